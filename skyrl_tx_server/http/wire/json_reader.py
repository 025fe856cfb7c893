"""Read the JSON objects of requests field by field. A missing required field, a wrong type and, in `finish`,
an unknown field raise a `UserError`."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeGuard

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.run_index import MAX_METADATA_BYTES, metadata_bytes

MAX_TEXT_LENGTH = 4096
"""Default maximum length of a string in characters."""
MAX_METADATA_ITEMS = 64
MAX_METADATA_NAME_LENGTH = 128
MAX_TAG_LENGTH = 256
MAX_NAMES_IN_MESSAGE = 5
MAX_QUOTED_LENGTH = 80


class JsonReader:
    """A JSON object that is read field by field. The methods raise UserError for a missing field or a wrong
    type. A field whose value is null counts as missing."""

    def __init__(self, body: object, where: str) -> None:
        """`where` names the object in error messages."""
        if not isinstance(body, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(body).__name__}")
        self._values: dict[str, object] = {
            str(name): value for name, value in body.items() if value is not None
        }
        self._where = where
        self._read: set[str] = set()

    def value(self, name: str) -> object:
        self._read.add(name)
        return self._values.get(name)

    def _required[T](self, name: str, value: T | None) -> T:
        if value is None:
            raise UserError(f"{self._where}: {name} is missing")
        return value

    def _typed[T](self, name: str, kind: type[T], expected: str, default: T) -> T:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._invalid(name, expected, value)
        return value

    def _invalid(self, name: str, expected: str, value: object) -> UserError:
        return UserError(f"{self._where}: {name} must be {expected}, got {quoted(value)}")

    def optional_text(self, name: str, *, max_length: int | None = MAX_TEXT_LENGTH) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self._invalid(name, "a string", value)
        if value is not None and max_length is not None and len(value) > max_length:
            raise UserError(
                f"{self._where}: {name} has {len(value)} characters; at most {max_length} are accepted"
            )
        return value

    def text(self, name: str) -> str:
        value = self._required(name, self.optional_text(name))
        if not value:
            raise self._invalid(name, "a non-empty string", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self.value(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._invalid(name, "an integer", value)
        return value

    def integer(self, name: str) -> int:
        return self._required(name, self.optional_integer(name))

    def number(self, name: str, default: float) -> float:
        value = self.value(name)
        if value is None:
            return default
        if not is_finite_number(value):
            raise self._invalid(name, "a finite number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, "true or false", default)

    def items(self, name: str) -> list[object]:
        return self._typed(name, list, "a list", [])

    def mapping(self, name: str) -> dict[str, object]:
        return self._typed(name, dict, "an object", {})

    def metadata(self, name: str) -> dict[str, str]:
        """Return user metadata. Numbers, booleans and null are converted to strings, because the SDK reads
        only strings. Raise UserError for a list, an object or metadata above the limits."""
        where, values = f"{self._where}: {name}", self.mapping(name)
        if len(values) > MAX_METADATA_ITEMS:
            raise UserError(f"{where} has {len(values)} entries; at most {MAX_METADATA_ITEMS} are accepted")
        parsed: dict[str, str] = {}
        for key, value in values.items():
            if len(key) > MAX_METADATA_NAME_LENGTH:
                raise UserError(
                    f"{where}: {quoted(key)} is too long a name; at most {MAX_METADATA_NAME_LENGTH} "
                    f"characters are accepted"
                )
            if isinstance(value, dict | list):
                raise UserError(f"{where}: the value of {quoted(key)} must be a string")
            parsed[key] = value if isinstance(value, str) else str(value)
        num_bytes = metadata_bytes(parsed)
        if num_bytes > MAX_METADATA_BYTES:
            raise UserError(f"{where} takes {num_bytes} bytes; at most {MAX_METADATA_BYTES} are accepted")
        return parsed

    def tags(self, name: str) -> list[str]:
        tags = self.items(name)
        if len(tags) > MAX_METADATA_ITEMS:
            raise UserError(f"{self._where}: {len(tags)} {name}; at most {MAX_METADATA_ITEMS} are accepted")
        parsed = [tag for tag in tags if isinstance(tag, str) and len(tag) <= MAX_TAG_LENGTH]
        if len(parsed) < len(tags):
            raise UserError(f"{self._where}: {name} must be strings of at most {MAX_TAG_LENGTH} characters")
        return parsed

    def refuse(self, name: str, alternative: str) -> None:
        """Raise UserError if the request sets a field that is not supported. The values null, false, 0 and an
        empty list do not count as set."""
        value = self.value(name)
        if value is not None and value is not False and value != 0 and value != []:
            raise UserError(f"{self._where}: {name} is not supported by this server; {alternative}")

    def finish(self, *, ignored: Collection[str] = ()) -> None:
        """Raise UserError for fields that were not read, because they might change the result. The `ignored`
        fields cannot change it."""
        unknown = sorted(set(self._values) - self._read - {*ignored})
        if unknown:
            raise UserError(f"{self._where}: unknown field {listed(unknown)}; remove it")


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite float, or an integer that is not too large for a float. A boolean is no
    number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def quoted(value: object) -> str:
    """Return a short description of a value that a client sent, for a message."""
    if isinstance(value, str):
        return repr(value[:MAX_QUOTED_LENGTH])
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return (
        f"an object of {len(value)} members" if isinstance(value, dict) else repr(value)[:MAX_QUOTED_LENGTH]
    )


def listed(names: list[str]) -> str:
    """Return the first names, each shortened, and the number of further names, for a message."""
    shown = ", ".join(name[:MAX_QUOTED_LENGTH] for name in names[:MAX_NAMES_IN_MESSAGE])
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
