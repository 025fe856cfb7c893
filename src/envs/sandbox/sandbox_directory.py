"""The host directory of a run's sandboxes and Docker trials. It is locked while the trainer runs, and later
runs remove it if the trainer was killed.

A sandbox needs a few host files (its requests and the initial files of its file system), and a Docker trial
needs a compose file. They are in `<root>/<run label>/`, where `<root>` is `root_directory()`. The trainer
holds an exclusive lock on the file `lock` there. The kernel releases the lock whenever the process ends, so
another trainer can distinguish an ended run from a live run without pid files.

All trainers of a user have the same root directory, whatever their environment variables are. No other user
can create this directory first.
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
from collections.abc import Generator
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
    """Return the parent of all sandbox directories of this user.

    The parent is /var/lib/agent-trainer for root and ~/.cache/agent-trainer for other users. If that
    directory cannot be created or used, or if ~/.cache is a link, belongs to another user or is writable by
    all users, the parent is a directory of this user in /tmp. `~` comes from the user database, not from the
    variable HOME. The unprivileged users of root's sandboxes can traverse the parent but not list it.
    """
    is_root = os.geteuid() == 0
    mode = 0o711 if is_root else 0o700
    parent = ROOTS_PARENT if is_root else _cache_directory()
    if parent is not None:
        root = parent / NAME
        try:
            root.mkdir(mode=mode, exist_ok=True)
            if _is_ours(root) and os.access(root, os.W_OK):
                root.chmod(mode)
                return root
        except OSError:
            pass  # for example, the file system is read-only
    return _temporary_root(mode)


def _cache_directory() -> Path | None:
    """Return ~/.cache, or None if it does not exist or if other users can replace its entries."""
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
        directory = home / ".cache"
        if home.is_dir() and _is_ours(home):
            directory.mkdir(mode=0o700, exist_ok=True)
        is_private = _is_ours(directory) and directory.stat().st_mode & 0o002 == 0
    except (KeyError, OSError):
        return None
    return directory if is_private else None


def _is_ours(directory: Path) -> bool:
    status = directory.lstat()
    return directory.is_dir() and not directory.is_symlink() and status.st_uid == os.geteuid()


def _temporary_root(mode: int) -> Path:
    """Return this user's first directory in /tmp whose name begins with `agent-trainer-UID-`. If there is
    none, create one with a random name, which other users cannot predict.
    """
    prefix = f"{NAME}-{os.geteuid()}-"
    try:
        ours = [path for path in sorted(SHARED_TEMPORARY.glob(f"{prefix}*")) if _is_ours(path)]
        if not ours:
            created = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_TEMPORARY))
            ours = [path for path in sorted(SHARED_TEMPORARY.glob(f"{prefix}*")) if _is_ours(path)]
            if ours[0] != created:  # another trainer created one at the same time, and its name sorts first
                created.rmdir()
        ours[0].chmod(mode)
    except OSError as error:
        raise SandboxError(
            f"cannot create a directory for sandboxes in {SHARED_TEMPORARY}: {error}"
        ) from error
    return ours[0]


@cache
def sandbox_directory(label: str) -> Path:
    """Create, lock and return the directory of the run `label`. It is removed when this process exits. If
    the process is killed, a later run removes it.
    """
    directory = _locked_directory(label)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child also runs the exit handlers of its parent
            _remove_run(directory)

    atexit.register(remove)
    return directory


@contextmanager
def temporary_sandbox_directory() -> Generator[Path]:
    """Yield a locked sandbox directory that is removed afterwards, for sandboxes that test the machine."""
    directory = _locked_directory(f"probe-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield directory
    finally:
        _remove_run(directory)


def _locked_directory(label: str) -> Path:
    """Create the directory of a run and lock it until this process ends or the directory is removed."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise SandboxError(
            f"run label {label!r} is not a file name; use letters, digits, dots, hyphens and underscores"
        )
    with _locked_root() as root:
        directory = root / label
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise SandboxError(f"another trainer uses the run label {label!r}") from error
    _locks[directory] = descriptor
    return directory


_locks: dict[Path, int] = {}  # the descriptors of the locks that this process holds


def _remove_run(directory: Path) -> bool:
    """Remove a run's directory and cgroups. Keep both and return False if a cgroup still has processes."""
    removed = True
    for record in sorted(directory.glob(f"*/{RECORD_NAME}")):
        removed = remove_cgroups(record.parent) and removed
    if removed and directory.exists():
        remove_tree(directory)
    if (descriptor := _locks.pop(directory, None)) is not None:
        os.close(descriptor)
    return removed


def live_run_labels() -> set[str]:
    """Return the labels of the runs whose trainer is running."""
    with _locked_root() as root:
        return {directory.name for directory in _runs(root) if _is_locked(directory)}


def remove_ended_runs() -> list[str]:
    """Remove the directories of runs whose trainer has ended. Return the labels of the removed runs."""
    with _locked_root() as root:
        ended_directories = [
            directory for directory in _runs(root) if not _is_locked(directory) and _remove_run(directory)
        ]
    if ended_directories:
        logger.info("removed the sandbox directories of %d ended runs", len(ended_directories))
    return [directory.name for directory in ended_directories]


def remove_path(path: Path) -> None:
    """Remove a file, a link or a directory tree without following links."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_tree(directory: Path) -> None:
    """Remove a directory tree without following links. Permissions that are missing for this are added."""
    retried: set[str] = set()

    def allow_and_retry(function: object, path: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError):
            return
        if path in retried:
            raise error
        retried.add(path)
        for protected in (path,) if path == str(directory) else (os.path.dirname(path), path):
            if not os.path.islink(protected):
                os.chmod(protected, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, onexc=allow_and_retry)
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
def _locked_root() -> Generator[Path]:
    """Yield the root directory and hold an exclusive lock on it, which serializes the start of runs and the
    removal of ended ones.
    """
    root = root_directory()
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(descriptor)
