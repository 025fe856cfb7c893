"""Files that are derived from a checkpoint's arrays on request, such as the archive of a download.

They are in `<root>/.derived/<generation>/`. A generation is one state of a checkpoint's arrays, which never
change, so files of one generation never change either, and a save under the same name gets new ones. A file
is complete or absent, because it is written under another name and renamed. Unused files, and those that a
killed process left, are removed by age.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

FOLDER = ".derived"


class DerivedFiles:
    """The derived files below the root of a checkpoint store."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def find(self, generation: str, name: str) -> Path | None:
        """Return a file or directory if it exists, and mark its generation as used."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder / generation)
            target = self._folder / generation / name
            if target.exists():
                return target
        return None

    def add(self, generation: str, name: str, make: Callable[[Path], None]) -> Path:
        """Let `make` create the file or directory at a temporary path, and rename it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        aside, target = self._folder / f".new-{uuid.uuid4().hex}", self._folder / generation / name
        try:
            make(aside)
            while True:
                with contextlib.suppress(
                    FileExistsError
                ):  # `exist_ok` would ask a second time whether it is there
                    target.parent.mkdir()
                try:
                    aside.rename(target)
                except FileNotFoundError:  # the generation was removed between the two calls
                    if not aside.exists():
                        raise
                except OSError:  # another thread has made the same directory
                    if not target.is_dir():
                        raise
                    return target
                else:
                    return target
        finally:
            _remove(aside)

    def forget(self, generation: str) -> None:
        """Remove the files of a generation, if there are any."""
        if (self._folder / generation).exists():
            self.discard(self._folder / generation)

    def discard(self, path: Path) -> bool:
        """Remove a file or directory of the same file system atomically. Return whether it existed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        grave = self._folder / f".removed-{uuid.uuid4().hex}"
        try:
            path.rename(grave)
        except FileNotFoundError:
            return False
        _remove(grave)
        return True

    def sweep(self, unused_for_s: float) -> None:
        """Remove what was unused for this time."""
        oldest = time.time() - unused_for_s
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        self.discard(Path(entry.path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
