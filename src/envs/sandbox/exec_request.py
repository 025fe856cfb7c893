"""The host side of one command that runs in a sandbox: a script and two FIFOs for its output.

The event loop reads stdout and stderr as they arrive. The exec server reports the exit status. The FIFOs have
random names in a directory that the sandbox cannot list, so a process in the sandbox cannot find the FIFOs of
another command by name. It can still write to the output of a running command through /proc/PID/fd.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """The exit status and the output of a command. `stdout` is empty when the output went to a file."""

    status: int
    stdout: bytes
    stderr: bytes


@dataclass(slots=True)
class Stream:
    """The bytes received from a FIFO. They are written to `file`, or kept in `data` if `file` is None. Bytes
    beyond MAX_FILE_BYTES or MAX_OUTPUT_BYTES, respectively, are dropped.
    """

    descriptor: int
    file: BinaryIO | None = None
    data: bytearray = field(default_factory=bytearray)
    num_written: int = 0

    def read(self) -> bool:
        """Read available bytes, at most 64 KiB. Return False at the end of the stream."""
        try:
            chunk = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return True
        self._append(chunk)
        return bool(chunk)

    def drain(self) -> None:
        """Read the bytes written before this call. Their number is determined first, because a background
        process may never stop writing.
        """
        size = int.from_bytes(fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)), "little")
        while size > 0 and (chunk := os.read(self.descriptor, size)):
            size -= len(chunk)
            self._append(chunk)

    def _append(self, chunk: bytes) -> None:
        capacity = (MAX_OUTPUT_BYTES if self.file is None else MAX_FILE_BYTES) - self.num_written
        kept = chunk[:capacity]
        self.num_written += len(kept)
        if self.file is not None:
            self.file.write(kept)
        else:
            self.data += kept


type Answer = tuple[str, str]  # the first word of an answer of the exec server, and its last argument


class ExecRequest:
    """The script and the FIFOs of a command, and the output received so far. `Bubblewrap` sends the request.
    `answer` is a future with the answer of the exec server.
    """

    def __init__(
        self, directory: Path, number: int, script: str, stdout: BinaryIO | None, user: SandboxUser
    ) -> None:
        self.number = number
        self.token = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._paths = [f"{directory}/{self.token}.{name}" for name in ("stdout", "stderr")]
        self._script = f"{directory}/{number}.sh"
        self.answer: asyncio.Future[Answer] = self._loop.create_future()
        self._error: SandboxError | None = None  # an output could not be stored
        descriptors: list[int] = []
        try:
            for path in self._paths:
                os.mkfifo(path, 0o600)
                user.grant_access(path, 0o620)
                descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            with open(self._script, "xb") as file:
                file.write(script.encode("utf-8", "surrogateescape"))
            user.grant_access(self._script, 0o640)
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise SandboxError(f"cannot send a command to the sandbox: {error}") from error
        self.stdout, self.stderr = (Stream(descriptor) for descriptor in descriptors)
        self.stdout.file = stdout
        for stream in (self.stdout, self.stderr):
            self._loop.add_reader(stream.descriptor, self._on_output, stream)

    async def result(self) -> CommandResult:
        """Wait for the answer, and read the rest of the output from the FIFOs. If the sandbox could not start
        the command, for example because of its process limit, the status is CANNOT_START_STATUS and stderr
        has the reason.
        """
        verb, argument = await self.answer
        try:
            self.stdout.drain()
            self.stderr.drain()
        except OSError as error:
            self._fail(error)
        if self._error is not None:
            raise self._error
        if verb == "failed":
            self.stderr.data += f"cannot start a command: {argument}\n".encode()
        status = CANNOT_START_STATUS if verb == "failed" else int(argument)
        return CommandResult(status=status, stdout=bytes(self.stdout.data), stderr=bytes(self.stderr.data))

    def close(self) -> None:
        for stream in (self.stdout, self.stderr):
            # The reader is removed first, because the number of a closed descriptor can be reused at once.
            self._loop.remove_reader(stream.descriptor)
            os.close(stream.descriptor)
        for path in (*self._paths, self._script):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()  # marks the exception as read, so that asyncio does not log it
        self.answer.cancel()

    def _on_output(self, stream: Stream) -> None:
        more = False
        try:
            more = stream.read()
        except OSError as error:
            self._fail(error)
        if not more:
            self._loop.remove_reader(stream.descriptor)

    def _fail(self, error: OSError) -> None:
        """End the command with an error, for example because the disk that stores the output is full."""
        self._error = SandboxError(f"cannot store the output of a command: {error}")
        if not self.answer.done():
            self.answer.set_exception(self._error)
