"""Folders that only this user can read: a run's holds conversations, a server's holds its key.

Below a folder in which anybody may write, such as the temporary folder, a name can have been taken by somebody else: what exists there
must be a folder of this user, not a symbolic link, and what does not is made for this user alone.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from src.core.errors import ConfigError

logger = logging.getLogger(__name__)

PRIVATE = 0o700
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private(path: Path) -> None:
    """The folder, readable by this user alone whatever the umask. One that exists keeps its mode, which may be meant; a warning names it
    where others can read it."""
    make_parents(path)
    try:
        path.mkdir(mode=PRIVATE)
    except FileExistsError:
        if (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
            logger.warning(
                "%s can be read by other users (mode %03o); for this user alone: chmod 700", path, mode
            )
    else:
        path.chmod(PRIVATE)  # the umask may have taken more away than is needed to write there


def resolved(path: Path) -> Path:
    """The path without symbolic links. ConfigError for one that another user may have put there."""
    path = path.expanduser().absolute()
    for entry in (*reversed(path.parents), path):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            if entry != entry.parent and _is_open_to_all(entry.parent):
                require_own(entry)
    return path.resolve()


def make_parents(path: Path) -> None:
    """The folders above `path`, private where anybody may write beside them."""
    for folder in [*reversed(resolved(path).parents)][1:]:
        with suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE if _is_open_to_all(folder.parent) else 0o777)
    resolved(path)  # once more: somebody may have been faster


def require_own(path: Path) -> None:
    """ConfigError unless the path, which lies where anybody may write, is a folder of this user or of root and no symbolic link."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link in a folder that every user can write to; give another log_path or logs_dir"
        )
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user or is no folder; give another log_path or logs_dir"
        )


def write_private(path: Path, text: str) -> None:
    """A file that this user alone can read, also while it is being written."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)


def _is_open_to_all(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)
