"""Files between the host and a trial's machine. What comes out was made by an agent: it is bounded, and never trusted.

Everything here that costs time in proportion to what an agent made runs in a thread. Bounds hold for one trial; what exceeds them is left
out, which is logged, noted in the trial's folder and counted, and never fails the trial.
"""

from __future__ import annotations

import asyncio
import codecs
import io
import logging
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from src.core.errors import SandboxError

logger = logging.getLogger(__name__)

MAX_FILES = 10_000  # of one trial: files and directories
MAX_BYTES = 64 * 2**20  # of one trial
LOG_SHARE = (
    4  # one directory of logs may take this part of the trial's bounds, so that logs leave room for artifacts
)
MAX_DEPTH = 32
MAX_PATH_BYTES = 1024
HEADER_BYTES = 2048  # what an archive may take for each member beside its contents
COLLECT_TIMEOUT_S = 60.0
REWARD_FILES = ("reward.json", "reward.txt")  # come first, whatever else there is, and are never cut
MAX_REWARD_BYTES = 2**20
NOTE = "left_out.txt"
CUT_SUFFIX = ".cut"
CHUNK = 2**16
LARGE_OUTPUT = 2**20


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(kw_only=True, slots=True)
class DownloadBudget:
    """What one download may still take."""

    files: int = MAX_FILES
    size: int = MAX_BYTES

    @property
    def archive_bytes(self) -> int:
        """The longest archive that is worth reading."""
        return self.size + self.files * HEADER_BYTES


class TrialDownloads:
    """What was taken from one machine of a trial so far. `note` is the file that says what was left out."""

    def __init__(self, folder: Path, *, files: int = MAX_FILES, size: int = MAX_BYTES) -> None:
        self._note = folder / NOTE
        self._files = files
        self._size = size
        self._left = DownloadBudget(files=files, size=size)
        self.taken: set[Path] = (
            set()
        )  # files on the host that came from the machine; it need not get them back

    def allowance(self, source: str) -> DownloadBudget:
        """For a download of `source`: a part of the whole for a directory of logs, what is left for anything else."""
        share = (
            LOG_SHARE
            if PurePosixPath(source).parent == PurePosixPath("/logs") and not source.endswith("artifacts")
            else 1
        )
        return DownloadBudget(
            files=min(self._left.files, self._files // share), size=min(self._left.size, self._size // share)
        )

    def unpack(self, archive: Readable, target: Path, left: DownloadBudget) -> bool:
        """`unpack`, which remembers what it wrote. Blocks."""
        return unpack(archive, target, left, self.taken)

    def host_files(self, source: Path, target: str) -> list[tuple[Path, str]]:
        """What of a host directory did not come from the machine itself, each file with its place below `target`. Blocks."""
        return [
            (path, place) for path, place in list_files(source, target) if path.absolute() not in self.taken
        ]

    def has_downloads_below(self, target: Path) -> bool:
        """Whether anything of the machine lies below a host directory."""
        return any(path.is_relative_to(target.absolute()) for path in self.taken)

    def take(self, source: str, given: DownloadBudget, left: DownloadBudget, *, is_whole: bool) -> None:
        """Counts a download that was `given` an allowance of which that much is `left`, and notes one that is not whole."""
        self._left.files -= given.files - left.files
        self._left.size -= given.size - left.size
        if not is_whole:
            note(
                self._note,
                f"{source}: cut at {given.files} files, {given.size / 2**20:g} MiB, {MAX_DEPTH} levels; the rest was left out",
            )


class BoundedFile(io.FileIO):
    """A temporary file that keeps no more than `limit` bytes of what is written to it."""

    def __init__(self, limit: int) -> None:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        super().__init__(descriptor, "w+b")
        self._limit = limit
        self.was_cut = False

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        room = max(0, self._limit - self.tell())
        if len(data) > room:
            self.was_cut = True
        super().write(memoryview(data)[:room])
        return len(data)


class ChunkReader:
    """A stream of chunks as a file to read from. It ends early after `limit` bytes or at the deadline."""

    def __init__(self, chunks: Iterator[bytes], limit: int, *, timeout_s: float = COLLECT_TIMEOUT_S) -> None:
        self._chunks = chunks
        self._buffer = bytearray()
        self._left = limit
        self._deadline = time.monotonic() + timeout_s

    @property
    def was_cut(self) -> bool:
        return self._left <= 0 or time.monotonic() >= self._deadline

    def read(self, size: int, /) -> bytes:
        while len(self._buffer) < size and self._left > 0 and time.monotonic() < self._deadline:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._left -= len(chunk)
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def note(path: Path, line: str) -> None:
    """One line in the log and in the trial's folder on what is missing there."""
    logger.warning("%s: %s", path.parent.name, line)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


async def decode_output(output: bytes) -> str:
    """What a command printed, as text; much of it in a thread."""
    return (
        output.decode("utf-8", "replace")
        if len(output) <= LARGE_OUTPUT
        else await asyncio.to_thread(_decoded_in_pieces, output)
    )


def _decoded_in_pieces(output: bytes) -> str:
    """One call for all of it would hold the interpreter's lock throughout."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(output[start : start + CHUNK]) for start in range(0, len(output), CHUNK)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def list_files(source: Path, target: str) -> list[tuple[Path, str]]:
    """Everything in a host directory, each with its place below `target` inside."""
    return [
        (path, str(PurePosixPath(target, path.relative_to(source).as_posix())))
        for path in sorted(source.rglob("*"))
    ]


def write_untrusted_file(received: IO[bytes], target: Path) -> None:
    """Write downloaded bytes to a file of their own, never through a link that is already there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    received.seek(0)
    with target.open("xb") as file:
        shutil.copyfileobj(received, file)


def unpack(
    archive: Readable, target: Path, allowance: DownloadBudget, taken: set[Path] | None = None
) -> bool:
    """Unpack an archive made by an agent as far as `allowance` goes, which it uses up; whether all of it was unpacked.

    Regular files and directories only, never a link or a sparse file, nothing outside `target`, and nothing over a file that is there. The
    beginning of a file that is cut gets a name of its own. What is written is added to `taken`.
    """
    target.mkdir(parents=True, exist_ok=True)
    is_whole = True
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members.clear()  # it would keep every header
                is_reward = member.name.removeprefix("./") in REWARD_FILES and member.size <= MAX_REWARD_BYTES
                if allowance.files <= 0 or (allowance.size <= 0 and not is_reward):
                    return False
                allowance.files -= 1
                is_whole &= _unpack_member(
                    tar, member, target, allowance, set() if taken is None else taken, is_reward=is_reward
                )
    except OSError:  # of this host, such as a full disk
        raise
    except Exception as error:  # whatever a forged archive makes tarfile raise
        logger.debug("an archive could not be read to its end: %s: %s", type(error).__name__, error)
        return False
    return is_whole


def unpack_file(archive: Readable, target: Path, allowance: DownloadBudget) -> None:
    """Write the one regular file of an archive. SandboxError when there is none, or it is larger than `allowance`."""
    try:
        with tarfile.open(fileobj=archive, mode="r|", bufsize=CHUNK) as tar:  # type: ignore[call-overload]
            member = tar.next()
            if member is None or not member.isreg() or member.issparse():
                raise SandboxError(f"cannot download {target.name}: not a regular file")
            if not 0 <= member.size <= allowance.size or allowance.files <= 0:
                raise SandboxError(
                    f"cannot download {target.name}: {member.size} bytes are more than may be collected"
                )
            source = tar.extractfile(member)
            assert source is not None
            with tempfile.TemporaryFile() as received:
                shutil.copyfileobj(source, received)
                write_untrusted_file(received, target)
    except (OSError, SandboxError):
        raise
    except Exception as error:  # whatever a forged archive makes tarfile raise
        raise SandboxError(f"cannot download {target.name}: {type(error).__name__}: {error}") from error
    allowance.files -= 1
    allowance.size -= member.size


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    target: Path,
    allowance: DownloadBudget,
    taken: set[Path],
    *,
    is_reward: bool,
) -> bool:
    """Whether nothing of the member is missing. Links and devices do not count as missing: they are never taken."""
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
    place = target / member.name
    try:
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
            return True
        place.parent.mkdir(parents=True, exist_ok=True)
        file = place.open("xb")
    except OSError:  # it is there already, or is a file where a directory should be
        return True
    source = tar.extractfile(member)
    assert source is not None
    size, written = member.size, 0
    try:
        with file:
            written = _copy(source, file, size if is_reward else min(size, allowance.size))
    finally:
        if written < size:
            place = _rename_cut_file(place, is_reward=is_reward)
        taken.add(place.absolute())
    allowance.size -= min(allowance.size, written)
    if is_reward and written < size:
        return False
    place.chmod(0o755 if (member.mode or 0) & 0o100 else 0o644)
    return written == size


def _rename_cut_file(place: Path, *, is_reward: bool) -> Path:
    """Nobody may take the beginning of a file for the file."""
    if is_reward:
        place.unlink()
        return place
    return place.replace(place.with_name(os.fsdecode(os.fsencode(place.name)[:200]) + CUT_SUFFIX))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> int:
    """Copy `size` bytes; how many there were."""
    written = 0
    while written < size and (chunk := source.read(min(CHUNK, size - written))):
        target.write(chunk)
        written += len(chunk)
    return written
