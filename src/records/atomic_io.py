"""Files that outlive a crash: whole lines or none, the new file or the old one. A full disk is a StorageError that names the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from src.core.errors import StorageError

BLOCK = 2**16  # bytes; of a file that may be large, its end is read in blocks of so many


def append_record(path: Path, record: Mapping[str, object], *, sync: bool = True) -> None:
    """One JSON line at the end of the file; a line that does not fit on the disk is taken back. `sync` waits for the disk itself, which
    only a power cut calls for: what was written survives the process in any case."""
    line = (json.dumps(record) + "\n").encode()
    with storage_boundary(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def truncate_torn_line(path: Path) -> None:
    """Cuts off what follows the last whole line, so that the next one starts on its own."""
    if not path.exists():
        return
    with storage_boundary(path), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def replace_text(path: Path, text: str) -> None:
    """The file holds `text`, or what it held before, whenever the process dies."""
    with storage_boundary(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        try:
            with beside.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def storage_boundary(path: Path) -> Iterator[None]:
    """Attributes what the file system raises to the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; make room or mend it, then resume the run"
        ) from error


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
