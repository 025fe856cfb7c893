"""File writes that survive crashes. A replaced file is written completely or not at all. An appended file can
end with an incomplete line after a crash; readers skip this line.

A failed write raises a StorageError that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from src.core.errors import StorageError

RESUME = "free space or fix the cause, then resume the run"
"""What to do after an error that ends a run."""
RUN_AGAIN = "free space or fix the cause, then run the command again"
"""What to do after an error that ends a command without a run to resume."""
CHUNK_BYTES = 2**16  # large files are searched from their end in chunks of this size
MAX_DEPTH = 100  # deepest nesting of values in a JSON line; the reader of the lines allows about 200


def append_record(path: Path, record: Mapping[str, object], *, sync: bool = True) -> None:
    """Append one JSON line. If the write fails, for example on a full disk, the incomplete line is removed.

    With `sync`, the line survives a power failure. Without `sync`, it survives only a crash of the process.
    """
    line = (json.dumps(readable(record)) + "\n").encode()
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


def readable(value: object, *, depth: int = 0) -> object:
    """Return the value in a form whose JSON text `src/records/reading.py` can read.

    An agent or an environment can write text that the reader rejects. Unpaired surrogates become question
    marks. Objects and lists at the depth MAX_DEPTH become JSON text.

    >>> readable({"a": ["\\ud83d", 1]})
    {'a': ['?', 1]}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == MAX_DEPTH:
        return json.dumps(value)
    if isinstance(value, Mapping):
        return {
            readable(key, depth=depth + 1): readable(item, depth=depth + 1) for key, item in value.items()
        }
    return [readable(item, depth=depth + 1) for item in value]


def truncate_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next record is not appended to it."""
    if not path.exists():
        return
    with storage_boundary(path), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - CHUNK_BYTES)
            file.seek(start)
            if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def replace_text(path: Path, text: str, *, advice: str = RESUME) -> None:
    """Replace the content of a file. After a crash the file has either the old or the new content.

    `advice` is the end of the error message.
    """
    with storage_boundary(path, advice=advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def storage_boundary(path: Path, *, advice: str = RESUME) -> Generator[None]:
    """Convert OSError to a StorageError that names the file and ends with `advice`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write {path}: {reason}; {advice}") from error


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
