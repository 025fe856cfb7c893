"""Read small JSON files of unknown origin, with limits of their size and depth."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

MAX_BYTES = 16 << 20
MAX_DEPTH = 32


def read_json_object(
    file: Path, *, max_bytes: int = MAX_BYTES, follow_links: bool = True
) -> dict[str, object]:
    """Return the object in `file`. Raise OSError if it cannot be read or is not a regular file, and
    ValueError with the reason for any other content.
    """
    descriptor = os.open(
        file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    )
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        text = stream.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 10} KiB")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    level: list[dict[str, object] | list[object]] = [value]
    for _ in range(MAX_DEPTH):
        items = (item for held in level for item in (held.values() if isinstance(held, dict) else held))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")
