"""The host directory of a run's sandboxes: locked while its trainer lives, swept once that trainer is dead.

A sandbox needs a few host files (its requests and the skeleton of its root). They lie below `<root>/<run label>/`, where an exclusive
lock on `lock` says "alive". The kernel drops the lock with the process, however it dies, so the next start can tell a dead run's leftovers
from a living neighbour's without any pid files.

The root is the same for all trainers of a user, whatever their environment variables say, and no other user can create it first.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from src.core.errors import SandboxError
from src.envs.sandbox.resource_limits import RECORD_NAME, remove_cgroups

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
NAME = "agent-trainer"
ROOTS_PARENT = Path("/var/lib")
SHARED_TEMPORARY = Path("/tmp")


def root_directory() -> Path:
    """Where the directories of all runs of this user lie: /var/lib/agent-trainer for root, ~/.cache/agent-trainer for another user (home
    as in the user database). Where that cannot be created: a directory below /tmp that belongs to this user.

    Root's can be passed through, but not listed, by the unprivileged users of its sandboxes.
    """
    is_root = os.geteuid() == 0
    mode = 0o711 if is_root else 0o700
    parent = ROOTS_PARENT if is_root else _cache_directory()
    if parent is not None and (is_root or _is_private(parent)):
        root = parent / NAME
        try:
            root.mkdir(mode=mode, exist_ok=True)
            if _is_ours(root) and os.access(root, os.W_OK):
                root.chmod(mode)
                return root
        except OSError:
            pass  # a read-only file system, for example
    return _temporary_root(mode)


def _cache_directory() -> Path | None:
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        return None
    cache_directory = home / ".cache"
    try:
        if home.is_dir() and _is_ours(home):
            cache_directory.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return cache_directory


def _is_private(directory: Path) -> bool:
    """Whether not everybody can replace entries there."""
    try:
        return _is_ours(directory) and directory.stat().st_mode & 0o002 == 0
    except OSError:
        return False


def _is_ours(directory: Path) -> bool:
    status = directory.lstat()
    return directory.is_dir() and not directory.is_symlink() and status.st_uid == os.geteuid()


def _temporary_root(mode: int) -> Path:
    """The first directory of this user below /tmp with our prefix. The names are random, so that nobody can take them before."""
    prefix = f"{NAME}-{os.geteuid()}-"
    try:
        ours = [path for path in sorted(SHARED_TEMPORARY.glob(f"{prefix}*")) if _is_ours(path)]
        if not ours:
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_TEMPORARY))
            ours = [path for path in sorted(SHARED_TEMPORARY.glob(f"{prefix}*")) if _is_ours(path)]
            if ours[0] != made:  # another trainer was first
                made.rmdir()
        ours[0].chmod(mode)
    except OSError as error:
        raise SandboxError(
            f"cannot create a directory for the sandboxes in {SHARED_TEMPORARY}: {error}"
        ) from error
    return ours[0]


@cache
def run_directory(label: str) -> Path:
    """The locked directory of the run `label`, made on first use; it goes when this process ends, or at the next start."""
    directory = _locked_directory(label)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child also runs its parent's exit handlers
            _remove_run(directory)

    atexit.register(remove)
    return directory


@contextmanager
def temporary_run_directory() -> Iterator[Path]:
    """A locked run directory for the duration of a block, for a sandbox that tries out the machine."""
    directory = _locked_directory(f"probe-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield directory
    finally:
        _remove_run(directory)


def _locked_directory(label: str) -> Path:
    """The directory stays locked until this process ends or the directory is removed."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise SandboxError(f"run label {label!r} is not a plain file name")
    root = root_directory()
    with _exclusive(root / ".lock"):
        directory = root / label
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise SandboxError(f"another living trainer uses the run label {label!r}") from error
    _locks[directory] = descriptor
    return directory


_locks: dict[Path, int] = {}  # the descriptors that hold the locks of this process


def _remove_run(directory: Path) -> bool:
    """Remove a run's directory with its cgroups; keep it for the next sweep while a cgroup still has processes."""
    removed = True
    for record in sorted(directory.glob(f"*/{RECORD_NAME}")):
        removed = remove_cgroups(record) and removed
    if removed and directory.exists():
        remove_tree(directory)
    if (descriptor := _locks.pop(directory, None)) is not None:
        os.close(descriptor)
    return removed


def live_run_labels() -> set[str]:
    """The labels of the runs whose trainer is alive."""
    root = root_directory()
    with _exclusive(root / ".lock"):
        return {directory.name for directory in _runs(root) if _is_locked(directory)}


def remove_dead_runs() -> list[str]:
    """Remove the directories of dead runs, and only those; their labels."""
    root = root_directory()
    with _exclusive(root / ".lock"):
        dead = [
            directory for directory in _runs(root) if not _is_locked(directory) and _remove_run(directory)
        ]
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
