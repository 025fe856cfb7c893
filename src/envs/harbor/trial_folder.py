"""A trial's folder on the host once the trial has ended: bounded, free of links, and within the run's quota.

The bounds of `transfer` hold for each download; here they hold for the folder as a whole, whatever environment and whatever part of Harbor
wrote there. Nothing that is removed here was needed for the grade, which is known by then.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from src.envs.sandbox.file_copy import MAX_BYTES, MAX_DEPTH, MAX_FILES, NOTE, REWARD_FILES, note
from src.envs.sandbox.run_directory import remove_tree

logger = logging.getLogger(__name__)

TOP_LEVEL = ("config.json", "result.json", "lock.json", "trial.log", "exception.txt", NOTE)
ESSENTIAL = frozenset([*TOP_LEVEL, *(f"verifier/{name}" for name in REWARD_FILES)])
LOGS = ("trial.log", "exception.txt")
MAX_LOG_BYTES = 2**20  # of each of these logs where the quota is used up


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a trial's folder holds in the end."""

    size: int
    is_whole: bool  # nothing was left out, here or in a download
    is_essential_only: bool = False


@dataclass(kw_only=True, slots=True)
class JobsQuota:
    """What the trials of one run may keep in its jobs folder. Past it, a trial keeps its essential files."""

    limit: int
    _used: int | None = None  # None: not measured yet
    _is_told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, folder: Path) -> Kept:
        """Bound the folder of a trial that has ended. Blocks: call it in a thread."""
        with self._lock:  # one trial at a time, so that none passes on the room that another one takes
            if self._used is None:
                self._used = sum(
                    entry.stat(follow_symlinks=False).st_size for entry, _ in _entries(folder.parents[1])
                )
                self._used -= sum(entry.stat(follow_symlinks=False).st_size for entry, _ in _entries(folder))
            if not folder.is_dir():
                return Kept(size=0, is_whole=True)
            kept = bound(folder)
            if self._used + kept.size > self.limit:
                kept = keep_essential(folder)
                self._tell(folder.parents[1])
            self._used += kept.size
            return kept

    def _tell(self, jobs: Path) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%s: jobs_quota_gb=%g is used up; further trials keep only their results and rewards",
                jobs,
                self.limit / 2**30,
            )


def bound(folder: Path, *, files: int = MAX_FILES, size: int = MAX_BYTES) -> Kept:
    """Remove links and special files, and what exceeds the bounds of one trial: first what lies deepest and is no essential file."""
    left_files, left_size = files, size
    excess: list[Path] = []
    entries = sorted(
        _entries(folder),
        key=lambda entry: (_relative(folder, entry[0]) not in ESSENTIAL, entry[1], entry[0].path),
    )
    for entry, depth in entries:
        status = entry.stat(follow_symlinks=False)
        length = status.st_size if stat.S_ISREG(status.st_mode) else 0
        is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not is_plain or left_files <= 0 or length > left_size or depth > MAX_DEPTH:
            excess.append(Path(entry.path))
        else:
            left_files -= 1
            left_size -= length
    for path in excess:
        _remove(path)
    if excess:
        note(
            folder / NOTE,
            f"the folder: {len(excess)} of {len(entries)} files exceeded {files} files, {size / 2**20:g} MiB or were links",
        )
    return Kept(size=size - left_size, is_whole=not (folder / NOTE).exists())


def keep_essential(folder: Path) -> Kept:
    """Remove everything but the essential files, and of the logs among them all but the first MiB."""
    size = 0
    with os.scandir(folder) as top:
        for entry in [*top]:
            if entry.is_dir(follow_symlinks=False) and entry.name == "verifier":
                for path in [*Path(entry.path).iterdir()]:
                    if f"verifier/{path.name}" not in ESSENTIAL:
                        _remove(path)
            elif entry.name not in ESSENTIAL:
                _remove(Path(entry.path))
    for entry, _ in _entries(folder):
        if entry.is_file(follow_symlinks=False):
            if entry.name in LOGS and entry.stat(follow_symlinks=False).st_size > MAX_LOG_BYTES:
                os.truncate(entry.path, MAX_LOG_BYTES)
            size += entry.stat(follow_symlinks=False).st_size
    return Kept(size=size, is_whole=False, is_essential_only=True)


def _entries(folder: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    """Everything below a folder with its depth, following no link. A tree of any depth needs no recursion."""
    waiting = [(str(folder), 1)]
    while waiting:
        directory, depth = waiting.pop()
        try:
            with os.scandir(directory) as found:
                entries = [*found]
        except OSError:  # gone meanwhile, or too deep to name: its parent is removed with it
            continue
        for entry in entries:
            yield entry, depth
            if entry.is_dir(follow_symlinks=False) and depth <= MAX_DEPTH:
                waiting.append((entry.path, depth + 1))


def _relative(folder: Path, entry: os.DirEntry[str]) -> str:
    return os.path.relpath(entry.path, folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
