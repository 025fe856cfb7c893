"""Limit the size and the file types of a trial's directory on the host after the trial has ended, and enforce
the quota of the run.

`src.envs.sandbox.file_copy` limits each download. This module limits the directory as a whole, whichever
environment or part of Harbor wrote the files. The trial is already graded, so its grade does not depend on
the removed files.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from src.envs.sandbox.file_copy import MAX_BYTES, MAX_DEPTH, MAX_FILES, NOTE_FILE, REWARD_FILES, note
from src.envs.sandbox.sandbox_directory import remove_path

logger = logging.getLogger(__name__)

TOP_LEVEL = ("config.json", "result.json", "lock.json", "trial.log", "exception.txt", NOTE_FILE)
ESSENTIAL = frozenset([*TOP_LEVEL, *(f"verifier/{name}" for name in REWARD_FILES)])
LOGS = ("trial.log", "exception.txt")
MAX_LOG_BYTES = 2**20  # the limit of each file in LOGS when the quota is used up


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectorySummary:
    """The state of a trial's directory after the limits were applied."""

    size: int  # bytes
    is_complete: bool  # False if this module or a download left out a file
    is_essential_only: bool = False


@dataclass(kw_only=True, slots=True)
class JobsQuota:
    """The size limit of a jobs directory. A trial that would exceed it keeps only its essential files."""

    limit: int  # bytes
    _sizes: dict[Path, int] | None = None  # directory of a trial -> its bytes; None: not measured yet
    _has_warned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enforce(self, directory: Path) -> DirectorySummary:
        """Apply the limits to the directory of a trial that has ended. This method blocks its thread."""
        with self._lock:  # Two trials must not both use the last free bytes.
            if self._sizes is None:
                self._sizes = _measure(directory.parents[1])
            self._sizes.pop(directory, None)
            if not directory.is_dir():
                return DirectorySummary(size=0, is_complete=True)
            summary = apply_limits(directory)
            if sum(self._sizes.values()) + summary.size > self.limit:
                summary = keep_essential(directory)
                self._warn_once(directory.parents[1])
            self._sizes[directory] = summary.size
            return summary

    def _warn_once(self, jobs: Path) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the files of a trial would exceed jobs_quota_gb=%g; such trials keep only their "
                "results, rewards and logs",
                jobs,
                self.limit / 2**30,
            )


def apply_limits(
    directory: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES
) -> DirectorySummary:
    """Remove links, special files, and the files and directories that exceed the limits of one trial.

    Essential files count towards the limits first, then the other files in order of their depth.
    """
    remaining_files, remaining_bytes = max_files, max_bytes
    excess: list[Path] = []
    entries = sorted(
        _entries(directory),
        key=lambda entry: (
            os.path.relpath(entry[0].path, directory) not in ESSENTIAL,
            entry[1],
            entry[0].path,
        ),
    )
    for entry, depth in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # another process removed it
            continue
        except OSError:  # the path is too long for the kernel, so its parent must be removed
            excess.append(Path(entry.path).parent)
            continue
        length = status.st_size if stat.S_ISREG(status.st_mode) else 0
        is_regular = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not is_regular or remaining_files <= 0 or length > remaining_bytes or depth > MAX_DEPTH:
            excess.append(Path(entry.path))
        else:
            remaining_files -= 1
            remaining_bytes -= length
    for path in excess:
        remove_path(path)
    if excess:
        note(
            directory / NOTE_FILE,
            f"the directory: {len(excess)} of {len(entries)} entries were removed, because they exceeded the "
            f"limits ({max_files} files, {max_bytes / 2**20:g} MiB, {MAX_DEPTH} levels) or were links or "
            "special files",
        )
    return DirectorySummary(
        size=max_bytes - remaining_bytes, is_complete=not (directory / NOTE_FILE).exists()
    )


def keep_essential(directory: Path) -> DirectorySummary:
    """Remove all files except the essential ones. Truncate the files in LOGS to `MAX_LOG_BYTES`."""
    size = 0
    with os.scandir(directory) as top:
        for entry in [*top]:
            if entry.is_dir(follow_symlinks=False) and entry.name == "verifier":
                for path in [*Path(entry.path).iterdir()]:
                    if f"verifier/{path.name}" not in ESSENTIAL:
                        remove_path(path)
            elif entry.name not in ESSENTIAL:
                remove_path(Path(entry.path))
    for entry, _ in _entries(directory):
        if entry.is_file(follow_symlinks=False):
            if entry.name in LOGS and entry.stat(follow_symlinks=False).st_size > MAX_LOG_BYTES:
                os.truncate(entry.path, MAX_LOG_BYTES)
            size += entry.stat(follow_symlinks=False).st_size
    return DirectorySummary(size=size, is_complete=False, is_essential_only=True)


def _measure(jobs: Path) -> dict[Path, int]:
    """Return the bytes of each entry of `jobs` and of each entry of a step directory, by path. The bytes of a
    trial directory, `jobs/STEP/TRIAL`, include all entries below it."""
    sizes: Counter[Path] = Counter()
    for entry, _ in _entries(jobs):
        parts = Path(entry.path).relative_to(jobs).parts
        # A running trial can remove or rename a file at any time, and a path can be too long for the kernel.
        with suppress(OSError):
            sizes[jobs.joinpath(*parts[:2])] += entry.stat(follow_symlinks=False).st_size
    return sizes


def _entries(directory: Path) -> Iterator[tuple[os.DirEntry[str], int]]:
    """Yield each entry below a directory with its depth. Links are not followed, and directories deeper than
    MAX_DEPTH are not read."""
    pending = [(str(directory), 1)]
    while pending:
        path, depth = pending.pop()
        try:
            with os.scandir(path) as iterator:
                entries = [*iterator]
        except OSError:  # The directory was removed, or its path is too long for the kernel.
            continue
        for entry in entries:
            yield entry, depth
            if entry.is_dir(follow_symlinks=False) and depth <= MAX_DEPTH:
                pending.append((entry.path, depth + 1))
