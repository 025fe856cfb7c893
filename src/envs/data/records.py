"""Records of .jsonl and .parquet files. Each record has its file and line for error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from src.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a file."""

    values: Mapping[str, Any]
    number: int  # from 1: the line of a .jsonl file, or the row of a .parquet file
    where: str  # for error messages: "a.jsonl:3" or "a.parquet, row 3"


def read_records(path: Path) -> list[Record]:
    """Read a .jsonl or .parquet file.

    Raises ConfigError, which names the file, if the file has another suffix, cannot be read or has no rows.
    The error about a line that is not a JSON object also names the line.
    """
    match path.suffix:
        case ".jsonl":
            records = read_json_lines(path)
        case ".parquet":
            records = _from_parquet(path)
        case _:
            raise ConfigError(f"{path} is neither a .jsonl nor a .parquet file; use one of these formats")
    if not records:
        raise ConfigError(f"{path} has no rows; give a file with at least one row")
    return records


def read_json_lines(path: Path) -> list[Record]:
    """Read a file with one JSON object per line, of any suffix. Raises ConfigError, as `read_records` does,
    except if the file has no rows."""
    try:
        lines = path.read_bytes().split(b"\n")  # splitlines() would also split at U+2028 inside a string
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    return [
        Record(values=_json_object(line, where=f"{path}:{number}"), number=number, where=f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _json_object(line: bytes, *, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: the line is not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: the line is not JSON ({error}); correct or remove it") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: the line is a JSON {type(value).__name__}, not an object; correct it")
    return value


def _from_parquet(path: Path) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} cannot be read as a parquet table: {reason}; correct the path or the file"
        ) from error
    return [
        Record(
            values=cast("dict[str, Any]", without_nulls(row)), number=number, where=f"{path}, row {number}"
        )
        for number, row in enumerate(rows, 1)
    ]


def without_nulls(value: object) -> object:
    """Return a value of a table without its null fields.

    In a parquet table, every record has all fields that occur in any record. A field that a record lacks is
    therefore null.

    >>> without_nulls([{"name": "cancel", "arguments": {"order": "W1", "items": None}}])
    [{'name': 'cancel', 'arguments': {'order': 'W1'}}]
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return (
        [without_nulls(part) for part in value]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        else value
    )
