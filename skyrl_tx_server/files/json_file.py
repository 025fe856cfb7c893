"""Reads small untrusted JSON files with limits on size and depth, and writes indented JSON files."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

MAX_BYTES = 16 << 20
MAX_DEPTH = 32


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json_object(
    file: Path, *, max_bytes: int = MAX_BYTES, follow_links: bool = True
) -> dict[str, object]:
    """Return the JSON object in `file`. Raise OSError if the file cannot be read or is not a regular file.
    Raise ValueError if its content is not a JSON object, is larger than `max_bytes`, or has more than
    MAX_DEPTH levels."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(file, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            text = stream.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(text) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 10} KiB")
    try:
        root = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(root, dict):
        raise ValueError("it is not a JSON object")
    level: list[dict[str, object] | list[object]] = [root]
    for _ in range(MAX_DEPTH):
        items = (item for value in level for item in (value.values() if isinstance(value, dict) else value))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return root
    raise ValueError("it is nested too deeply")
