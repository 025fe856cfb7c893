"""The host directory of a run's sandboxes: locked while its trainer lives, swept once that trainer is dead.

A sandbox needs a few host files (its requests and the skeleton of its root). They lie below `<temp>/agent-trainer-<uid>/<run label>/`,
where an exclusive lock on `lock` says "alive". The kernel drops the lock with the process, however it dies, so the next start can tell
a dead run's leftovers from a living neighbour's without any pid files.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from src.errors import SandboxError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"


def root_directory() -> Path:
    """Where the directories of all runs of this user lie. Private, and never somebody else's."""
    root = Path(tempfile.gettempdir()) / f"agent-trainer-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SandboxError(f"cannot create {root} for the sandboxes: {error}; point TMPDIR at a writable directory") from error
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid():
        raise SandboxError(f"{root} belongs to someone else; remove it or point TMPDIR elsewhere")
    return root


@cache
def run_directory(label: str) -> Path:
    """The locked directory of the run `label`, made on first use; it goes when this process ends, or at the next start."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise SandboxError(f"run label {label!r} is not a plain file name")
    root = root_directory()
    with _exclusive(root / ".lock"):
        directory = root / label
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise SandboxError(f"another living trainer uses the run label {label!r}") from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child also runs its parent's exit handlers
            remove_tree(directory)

    atexit.register(remove)
    return directory


def living_labels() -> set[str]:
    """The labels of the runs whose trainer is alive."""
    root = root_directory()
    with _exclusive(root / ".lock"):
        return {directory.name for directory in _runs(root) if _is_locked(directory)}


def sweep() -> list[str]:
    """Remove the directories of dead runs, and only those; their labels."""
    root = root_directory()
    with _exclusive(root / ".lock"):
        dead = [directory for directory in _runs(root) if not _is_locked(directory)]
        for directory in dead:
            remove_tree(directory)
    if dead:
        logger.info("removed the sandbox directories of %d dead runs", len(dead))
    return [directory.name for directory in dead]


def remove_tree(directory: Path) -> None:
    """Remove a directory tree, following no link and minding no missing permission."""

    def allow_and_retry(function: object, path: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            return
        parent = os.path.dirname(path)
        for place in (parent, path):
            if not os.path.islink(place):
                os.chmod(place, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    shutil.rmtree(directory, onexc=allow_and_retry)


def _runs(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def _is_locked(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; runs starting and sweeping at the same moment take turns."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
