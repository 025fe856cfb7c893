"""Reads the file of an offline wandb run. The wandb package has no reader in Python.

The file has the format of a LevelDB log. It consists of blocks of 32 KiB, which contain chunks. A chunk is a
header (checksum, length, type) and data. A record is one chunk of type FULL, or several chunks of which the
last has the type LAST.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

Record = vars(wandb_internal_pb2)["Record"]  # the module has no stubs and creates its classes at import

FILE_HEADER_BYTES = 7
HEADER = struct.Struct("<IHB")
BLOCK_BYTES = 32768
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the protobuf records of the file."""
    data, parts, position = path.read_bytes(), [], FILE_HEADER_BYTES
    while position + HEADER.size <= len(data):
        rest_of_block = BLOCK_BYTES - position % BLOCK_BYTES
        if rest_of_block < HEADER.size:
            position += rest_of_block
            continue
        _, length, chunk_type = HEADER.unpack_from(data, position)
        position += HEADER.size
        parts.append(data[position : position + length])
        position += length
        if chunk_type in (FULL, LAST):
            yield Record.FromString(b"".join(parts))
            parts = []


def history(path: Path) -> list[list[tuple[str, float]]]:
    """Return the (name, value) pairs of each logged step, in the order of the file."""
    steps = [record.history for record in records(path) if record.HasField("history")]
    return [
        [(item.key or ".".join(item.nested_key), json.loads(item.value_json)) for item in step.item]
        for step in steps
    ]
