"""Directories that only this user can read. A run's directory contains conversations, and a server's
directory contains an API key.

In a directory that every user can write to, such as the temporary directory, another user may have created an
entry of the same name. An existing entry must therefore be a directory of this user or of root, and not a
symbolic link. A new directory is private if every user can write to its parent. The directory that
`make_private` creates is always private.
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
    """Create the directory, readable by this user only. The umask has no effect.

    An existing directory keeps its mode; a warning is logged if other users can read it.
    """
    make_parents(path)
    try:
        path.mkdir(mode=PRIVATE)
    except FileExistsError:
        if (mode := stat.S_IMODE(path.stat().st_mode)) & OTHERS:
            logger.warning(
                "%s can be read by other users (mode %03o); run chmod 700 to exclude them", path, mode
            )
    else:
        path.chmod(PRIVATE)  # the umask may have removed permissions of this user


def resolved(path: Path) -> Path:
    """Resolve symbolic links.

    Raises ConfigError if `require_own` rejects an entry of a directory that every user can write to.
    """
    path = path.expanduser().absolute()
    for entry in (*reversed(path.parents), path):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            if entry != entry.parent and _is_open_to_all(entry.parent):
                require_own(entry)
    return path.resolve()


def make_parents(path: Path) -> None:
    """Create the parent directories of `path`. A new directory in a directory that every user can write to is
    private."""
    for directory in [*reversed(resolved(path).parents)][1:]:
        with suppress(FileExistsError):
            directory.mkdir(mode=PRIVATE if _is_open_to_all(directory.parent) else 0o777)
    resolved(path)  # another process may have created a parent meanwhile


def require_own(path: Path) -> None:
    """Raise ConfigError if `path` is not a directory of this user or of root, or is a symbolic link."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"{path} is a symbolic link in a directory that every user can write to; "
            "give another log_path or logs_dir"
        )
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user or is not a directory; give another log_path or logs_dir"
        )


def write_private(path: Path, text: str) -> None:
    """Create or replace a file that only this user can read. If the process ends meanwhile, an existing file
    has either the old or the new content."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def _is_open_to_all(directory: Path) -> bool:
    return bool(directory.stat().st_mode & stat.S_IWOTH)
