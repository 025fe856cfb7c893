"""One command on its way into a sandbox, seen from the host: a script, and two FIFOs for its output.

The event loop reads stdout and stderr as they arrive. The exit status comes from the exec server. The names of the FIFOs are random and
their directory cannot be listed, so that a process of the sandbox cannot write into the output of another command by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from src.core.errors import SandboxError
from src.envs.sandbox.user import SandboxUser

MAX_OUTPUT_BYTES = 16 * 2**20
MAX_FILE_BYTES = 2**30
CANNOT_START_STATUS = 126


@dataclass(slots=True)
class Stream:
    """Bytes arriving from a FIFO: into `file` when given, else kept; what exceeds the limit is dropped."""

    descriptor: int
    file: BinaryIO | None = None
    data: bytearray = field(default_factory=bytearray)
    num_written: int = 0

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        try:
            chunk = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return True
        self._take(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Take what was written before this call. A process left behind may write forever, so the amount is fixed first."""
        size = int.from_bytes(fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)), "little")
        while size > 0 and (chunk := os.read(self.descriptor, size)):
            size -= len(chunk)
            self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        room = (MAX_OUTPUT_BYTES if self.file is None else MAX_FILE_BYTES) - self.num_written
        kept = chunk[:room]
        self.num_written += len(kept)
        if self.file is not None:
            self.file.write(kept)
        else:
            self.data += kept


class Request:
    """One command on its way: its script and its two FIFOs on the host. `done` becomes its exit status."""

    def __init__(
        self, directory: Path, number: int, script: str, stdout: BinaryIO | None, user: SandboxUser
    ) -> None:
        self.number = number
        self.token = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._paths = [f"{directory}/{self.token}.{name}" for name in ("stdout", "stderr")]
        self._script = f"{directory}/{number}.sh"
        self.done: asyncio.Future[int] = self._loop.create_future()
        descriptors: list[int] = []
        try:
            for path in self._paths:
                os.mkfifo(path, 0o600)
                user.admit(path, 0o620)
                descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            with open(self._script, "xb") as file:
                file.write(script.encode("utf-8", "surrogateescape"))
            user.admit(self._script, 0o640)
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SandboxError(f"cannot hand a command to the sandbox: {error}") from error
        self.stdout, self.stderr = (Stream(descriptor) for descriptor in descriptors)
        self.stdout.file = stdout
        for stream in (self.stdout, self.stderr):
            self._loop.add_reader(stream.descriptor, self._on_output, stream)

    def finish(self, status: int) -> None:
        """The command has ended: what it wrote is in the FIFOs, whatever processes it left behind."""
        try:
            self.stdout.drain()
            self.stderr.drain()
        except OSError as error:  # the file that takes the output is on a full disk
            self.fail(SandboxError(f"cannot take a command's output: {error}"))
        if not self.done.done():
            self.done.set_result(status)

    def refuse(self, reason: str) -> None:
        """The sandbox could not start the command, for example because the agent has used up its processes."""
        self.stderr.data += f"cannot start a command: {reason}\n".encode()
        self.finish(CANNOT_START_STATUS)

    def fail(self, error: SandboxError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        for stream in (self.stdout, self.stderr):
            self._loop.remove_reader(stream.descriptor)  # before closing: the number may be reused at once
            os.close(stream.descriptor)
        for path in (*self._paths, self._script):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # seen, even when nobody waits any more
        self.done.cancel()

    def _on_output(self, stream: Stream) -> None:
        try:
            more = stream.read()
        except OSError as error:
            self.fail(SandboxError(f"cannot take a command's output: {error}"))
            more = False
        if not more:
            self._loop.remove_reader(stream.descriptor)
