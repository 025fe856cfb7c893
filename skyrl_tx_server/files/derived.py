"""Files that are derived from a checkpoint's arrays on request, such as the archive that a client
downloads.

Their path is `<root>/.derived/<generation>/<name>`. A generation is one save of a checkpoint. Its arrays
never change, so its derived files never change either. A file is complete or absent, because it is written
under another name and renamed. `DerivedFiles.sweep` removes files that were not used for some time, including
the unfinished files of killed processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

DIRECTORY = ".derived"


class DerivedFiles:
    """The derived files below the root of a checkpoint store."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY

    def make_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def find(self, generation: str, name: str) -> Path | None:
        """Return a file or directory if it exists, and mark its generation as used."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._directory / generation)
            target = self._directory / generation / name
            if target.exists():
                return target
        return None

    def add(self, generation: str, name: str, make: Callable[[Path], None]) -> Path:
        """Let `make` create the file or directory at a temporary path. Rename it and return its new path."""
        self.make_directory()
        temporary, target = self._directory / f".new-{uuid.uuid4().hex}", self._directory / generation / name
        try:
            make(temporary)
            while True:
                # `mkdir(exist_ok=True)` would raise an error if another thread removed the directory during
                # the call.
                with contextlib.suppress(FileExistsError):
                    target.parent.mkdir()
                try:
                    temporary.rename(target)
                except FileNotFoundError:  # the generation was removed between `mkdir` and `rename`
                    if not temporary.exists():
                        raise
                except OSError:  # another thread has made the same directory
                    if not target.is_dir():
                        raise
                    return target
                else:
                    return target
        finally:
            _remove(temporary)

    def forget(self, generation: str) -> None:
        """Remove the files of a generation, if there are any."""
        if (self._directory / generation).exists():
            self.discard(self._directory / generation)

    def discard(self, path: Path) -> bool:
        """Atomically remove a file or directory on the store's file system. Return whether it existed."""
        self.make_directory()
        removed = self._directory / f".removed-{uuid.uuid4().hex}"
        try:
            path.rename(removed)
        except FileNotFoundError:
            return False
        _remove(removed)
        return True

    def sweep(self, unused_for_s: float) -> None:
        """Remove generations that were not used for `unused_for_s` seconds, and temporary files of this
        age."""
        oldest = time.time() - unused_for_s
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        self.discard(Path(entry.path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
