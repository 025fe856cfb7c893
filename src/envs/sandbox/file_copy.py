"""Copy files between the host and the environment of a trial. An agent can make the downloaded files, so
their number and size are limited, and links are not written.

Operations whose time grows with the agent's files run in a thread. All downloads from one environment of a
trial share the limits. Files of a directory beyond the limits are omitted or truncated, and the trial does
not fail. The download of a single file beyond the limits raises SandboxError. Both cases are logged and
noted in the trial's directory, and the metric `files_left_out` counts the trial.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import io
import logging
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from src.core.errors import SandboxError

logger = logging.getLogger(__name__)

MAX_FILES = 10_000  # files and directories that are downloaded from one environment of a trial
MAX_BYTES = 64 * 2**20  # of all these files
LOG_SHARE = 4  # a directory of logs gets a quarter of these limits, so that artifacts are not omitted
MAX_DEPTH = 32
MAX_PATH_BYTES = 1024
HEADER_BYTES = 2048  # the allowance per member of an archive, besides its contents
COLLECT_TIMEOUT_S = 60.0
REWARD_FILES = ("reward.json", "reward.txt")  # downloaded first
MAX_REWARD_BYTES = 2**20  # a reward file of up to this size may exceed the limit on bytes
NOTE_FILE = "left_out.txt"
CUT_SUFFIX = ".cut"
CHUNK = 2**16
HOST_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Error numbers that this host causes when a file or directory is created. An OSError with one of these
numbers is raised. An OSError with another number may be caused by the archive, for example by a name that is
too long. The file is then skipped."""
LARGE_OUTPUT = 2**20  # bytes


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(kw_only=True, slots=True)
class DownloadBudget:
    """The numbers of files and bytes that a download may still write."""

    files: int = MAX_FILES
    size: int = MAX_BYTES
    is_whole: bool = True  # False if a part of the download was left out

    @property
    def archive_bytes(self) -> int:
        """The limit on the size of an archive, in bytes: the contents and HEADER_BYTES per file."""
        return self.size + self.files * HEADER_BYTES


class TrialDownloads:
    """The files that were downloaded from one environment of a trial. The file `NOTE_FILE` in `directory`
    lists incomplete downloads.
    """

    def __init__(self, directory: Path) -> None:
        self._note = directory / NOTE_FILE
        self._remaining = DownloadBudget()
        # Host paths of the files of downloaded directories. Uploads omit these files, because the environment
        # already has them.
        self.downloaded: set[Path] = set()

    @contextmanager
    def download(self, source: str) -> Generator[DownloadBudget]:
        """Yield the budget of a download. Afterwards, subtract the used part from the limits of the
        environment, and note a download that is not complete.

        A path directly below /logs gets at most 1/LOG_SHARE of the limits of the environment, unless the path
        is that of the artifacts.
        """
        is_log = PurePosixPath(source).parent == PurePosixPath("/logs") and not source.endswith("artifacts")
        share = LOG_SHARE if is_log else 1
        files = min(self._remaining.files, MAX_FILES // share)
        size = min(self._remaining.size, MAX_BYTES // share)
        budget = DownloadBudget(files=files, size=size)
        try:
            yield budget
        finally:
            self._remaining.files -= files - budget.files
            self._remaining.size -= size - budget.size
            if not budget.is_whole:
                note(
                    self._note,
                    f"{source}: at most {files} files, {size / 2**20:g} MiB, {MAX_DEPTH} levels "
                    f"and {COLLECT_TIMEOUT_S:g} s of download are allowed; the rest was omitted",
                )

    def host_files(self, source: Path, target: str) -> list[tuple[Path, str]]:
        """Return the files and directories below a host directory, except the files in `downloaded`, each
        with its path below `target`. This method blocks its thread.
        """
        return [
            (path, str(PurePosixPath(target, path.relative_to(source).as_posix())))
            for path in sorted(source.rglob("*"))
            if path.absolute() not in self.downloaded
        ]

    def has_downloads_below(self, target: Path) -> bool:
        """Return whether a host directory contains files in `downloaded`."""
        return any(path.is_relative_to(target.absolute()) for path in self.downloaded)


class BoundedFile(io.FileIO):
    """A temporary file that keeps the first `limit` bytes that are written to it."""

    def __init__(self, limit: int) -> None:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        super().__init__(descriptor, "w+b")
        self._limit = limit
        self.was_cut = False

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        capacity = max(0, self._limit - self.tell())
        if len(data) > capacity:
            self.was_cut = True
        super().write(memoryview(data)[:capacity])
        return len(data)


class ChunkReader:
    """A readable file over an iterator of chunks. It reads no further chunk after `limit` bytes or
    `timeout_s` seconds."""

    def __init__(self, chunks: Iterator[bytes], limit: int, *, timeout_s: float = COLLECT_TIMEOUT_S) -> None:
        self._chunks = chunks
        self._buffer = bytearray()
        self._remaining = limit
        self._deadline = time.monotonic() + timeout_s

    @property
    def was_cut(self) -> bool:
        return self._remaining <= 0 or time.monotonic() >= self._deadline

    def read(self, size: int, /) -> bytes:
        while len(self._buffer) < size and self._remaining > 0 and time.monotonic() < self._deadline:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._remaining -= len(chunk)
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def note(path: Path, line: str) -> None:
    """Log a line about omitted files and append it to the note in the trial's directory."""
    logger.warning("%s: %s", path.parent.name, line)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


async def decode_output(output: bytes) -> str:
    """Decode the output of a command, in a thread if it is large."""
    return (
        output.decode("utf-8", "replace")
        if len(output) <= LARGE_OUTPUT
        else await asyncio.to_thread(_decoded_in_pieces, output)
    )


def _decoded_in_pieces(output: bytes) -> str:
    """Decode in chunks, because one call would hold the interpreter lock until all bytes are decoded."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(output[start : start + CHUNK]) for start in range(0, len(output), CHUNK)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def write_untrusted_file(received: IO[bytes], target: Path) -> None:
    """Write downloaded bytes to a new file. An existing file or link at `target` is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    received.seek(0)
    with target.open("xb") as file:
        shutil.copyfileobj(received, file)


def unpack(
    archive: Readable, target: Path, budget: DownloadBudget, written_paths: set[Path] | None = None
) -> bool:
    """Unpack an archive that an agent made, within `budget`. Return whether the archive was unpacked
    completely. Subtract the number of members read and the bytes written from `budget`.

    Only regular files and directories below `target` are written: no links, no sparse files, and no existing
    file is overwritten. A truncated file gets the suffix `CUT_SUFFIX`; a truncated reward file is removed.
    The paths of written files are added to `written_paths`. Raises OSError for errors of this host and of the
    connection to a Docker engine.
    """
    target.mkdir(parents=True, exist_ok=True)
    is_whole = True
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep every header in memory
                is_reward = member.name.removeprefix("./") in REWARD_FILES and member.size <= MAX_REWARD_BYTES
                if budget.files <= 0 or (budget.size <= 0 and not is_reward):
                    return False
                budget.files -= 1
                is_whole &= _unpack_member(
                    tar,
                    member,
                    target,
                    budget,
                    set() if written_paths is None else written_paths,
                    is_reward=is_reward,
                )
    except OSError:  # for example a full disk, or a lost connection to a Docker engine
        raise
    except Exception as error:  # tarfile raises many types of exceptions for a forged archive
        logger.debug("an archive could not be read to its end: %s: %s", type(error).__name__, error)
        return False
    return is_whole


def unpack_file(archive: Readable, target: Path, budget: DownloadBudget) -> None:
    """Write the first member of an archive to `target` and subtract it from `budget`. Raises SandboxError if
    the archive cannot be read, or if this member is not a regular file or exceeds `budget`.
    """
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            member = tar.next()
            if member is None or not member.isreg() or member.issparse():
                raise SandboxError(f"cannot download {target.name}: not a regular file")
            if not 0 <= member.size <= budget.size or budget.files <= 0:
                raise SandboxError(
                    f"cannot download {target.name} ({member.size} bytes): the limit on the bytes or "
                    "the number of files that are downloaded from an environment is exceeded"
                )
            source = tar.extractfile(member)
            assert source is not None
            with tempfile.TemporaryFile() as received:
                shutil.copyfileobj(source, received)
                write_untrusted_file(received, target)
    except (OSError, SandboxError):
        raise
    except Exception as error:  # tarfile raises many types of exceptions for a forged archive
        raise SandboxError(f"cannot download {target.name}: {type(error).__name__}: {error}") from error
    budget.files -= 1
    budget.size -= member.size


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    target: Path,
    budget: DownloadBudget,
    written_paths: set[Path],
    *,
    is_reward: bool,
) -> bool:
    """Write one member. Return whether it is complete. Members that are never written (links, devices, paths
    outside of `target`, existing files) count as complete.
    """
    if not (member.isreg() or member.isdir()):
        return True
    parts = PurePosixPath(member.name).parts
    if (
        len(parts) > MAX_DEPTH
        or len(member.name.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES
        or member.issparse()
        or member.size < 0
    ):
        return False
    try:
        member = tarfile.data_filter(member, str(target))
    except tarfile.FilterError:
        return True
    path = target / member.name
    try:
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except OSError as error:
        if error.errno in HOST_ERRORS:
            raise
        return True  # the file exists, a parent is not a directory, or the name is too long
    source = tar.extractfile(member)
    assert source is not None
    size, written = member.size, 0
    try:
        with file:
            written = _copy(source, file, size if is_reward else min(size, budget.size))
    finally:
        if written < size:
            path = _rename_cut_file(path, is_reward=is_reward)
        written_paths.add(path.absolute())
    budget.size -= min(budget.size, written)
    if is_reward and written < size:
        return False
    path.chmod(0o755 if (member.mode or 0) & 0o100 else 0o644)
    return written == size


def _rename_cut_file(path: Path, *, is_reward: bool) -> Path:
    """Rename a truncated file, so that it is not taken for the complete one, or remove a reward file."""
    if is_reward:
        path.unlink()
        return path
    return path.replace(path.with_name(os.fsdecode(os.fsencode(path.name)[:200]) + CUT_SUFFIX))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> int:
    """Copy at most `size` bytes and return how many were copied."""
    written = 0
    while written < size and (chunk := source.read(min(CHUNK, size - written))):
        target.write(chunk)
        written += len(chunk)
    return written
