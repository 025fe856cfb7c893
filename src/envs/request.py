"""One command on its way into a sandbox, seen from the host: a script, and three FIFOs for what comes back.

Events drive it: the loop reads stdout and stderr as they arrive, and the status FIFO either brings the exit status or closes without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from src.errors import SandboxError

MAX_OUTPUT_BYTES = 16 * 2**20


@dataclass(slots=True)
class Stream:
    """Bytes arriving from a FIFO: into `file` when given, else kept up to the limit."""

    descriptor: int
    file: BinaryIO | None = None
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            chunk = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return True
        self._take(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Take all that was written so far, waiting for nothing."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.descriptor, 2**16):
                self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        if self.file is not None:
            self.file.write(chunk)
        elif len(self.data) < MAX_OUTPUT_BYTES:
            self.data += chunk[: MAX_OUTPUT_BYTES - len(self.data)]


class Request:
    """One command on its way: its script and its three FIFOs on the host.

    `done` becomes its exit status, or None when the process that reports the status was killed before it could.
    """

    def __init__(self, directory: Path, number: int, script: str, stdout: BinaryIO | None) -> None:
        self.number = number
        self._loop = asyncio.get_running_loop()
        self._paths = [directory / f"{number}.{name}" for name in ("stdout", "stderr", "status", "sh")]
        self.done: asyncio.Future[int | None] = self._loop.create_future()
        descriptors: list[int] = []
        try:
            for path in self._paths[:3]:
                os.mkfifo(path, 0o600)
                descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            self._paths[3].write_bytes(script.encode("utf-8", "surrogateescape"))
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SandboxError(f"cannot hand a command to the sandbox: {error}") from error
        self.stdout, self.stderr, self._status = (Stream(descriptor) for descriptor in descriptors)
        self.stdout.file = stdout
        self._open = [self.stdout, self.stderr, self._status]
        self._loop.add_reader(self.stdout.descriptor, self._on_output, self.stdout)
        self._loop.add_reader(self.stderr.descriptor, self._on_output, self.stderr)
        self._loop.add_reader(self._status.descriptor, self._on_status)

    def fail(self, error: SandboxError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        for stream in self._open:
            self._loop.remove_reader(stream.descriptor)  # before closing: the number may be reused at once
            os.close(stream.descriptor)
        self._open.clear()
        for path in self._paths:
            path.unlink(missing_ok=True)
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # seen, even when nobody waits any more
        self.done.cancel()

    def _on_output(self, stream: Stream) -> None:
        if not stream.read():
            self._loop.remove_reader(stream.descriptor)

    def _on_status(self) -> None:
        more = self._status.read()
        if more and not self._status.data:
            return
        self._loop.remove_reader(self._status.descriptor)
        try:
            self.stdout.drain()
            self.stderr.drain()
        except OSError as error:  # the file that takes the output is on a full disk
            self.fail(SandboxError(f"cannot take a command's output: {error}"))
        if not self.done.done():
            self.done.set_result(int(self._status.data) if self._status.data else None)
