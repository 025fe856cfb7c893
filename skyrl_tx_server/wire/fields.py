"""JSON objects of requests, read field by field: what has the wrong type, and what nobody reads, is a `UserError`."""

from __future__ import annotations

import math

from skyrl_tx_server.errors import UserError


class Fields:
    """A JSON object read field by field, so that a wrong type is one clear line and an unread field can be refused."""

    def __init__(self, body: object, where: str) -> None:
        if not isinstance(body, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(body).__name__}")
        self._values: dict[str, object] = {str(name): value for name, value in body.items() if value is not None}
        self._where = where
        self._read: set[str] = set()

    def _take(self, name: str) -> object:
        self._read.add(name)
        return self._values.get(name)

    def _required[T](self, name: str, value: T | None) -> T:
        if value is None:
            raise UserError(f"{self._where}: {name} is missing")
        return value

    def _wrong(self, name: str, expected: str, value: object) -> UserError:
        return UserError(f"{self._where}: {name} must be {expected}, got {repr(value)[:80]}")

    def optional_text(self, name: str) -> str | None:
        value = self._take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def text(self, name: str) -> str:
        value = self._required(name, self.optional_text(name))
        if not value:
            raise self._wrong(name, "a non-empty string", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self._take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(name, "an integer", value)
        return value

    def integer(self, name: str) -> int:
        return self._required(name, self.optional_integer(name))

    def number(self, name: str, default: float) -> float:
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, "a finite number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def items(self, name: str) -> list[object]:
        value = self._take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def mapping(self, name: str) -> dict[str, object]:
        value = self._take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return value

    def anything(self, name: str) -> object:
        return self._take(name)

    def metadata(self, name: str) -> dict[str, str]:
        """User metadata; the reply types of the SDK allow string values only."""
        return {key: value if isinstance(value, str) else str(value) for key, value in self.mapping(name).items()}

    def refuse(self, name: str, alternative: str) -> None:
        """Refuse a field this server cannot honour, unless it is switched off."""
        value = self._take(name)
        if value is not None and value is not False and value != 0 and value != []:
            raise UserError(f"{self._where}: {name} is not supported by this server; {alternative}")

    def ignore(self, *names: str) -> None:
        """Fields that cannot change a result here."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuse what nobody read: it might have changed the result."""
        unknown = sorted(set(self._values) - self._read)
        if unknown:
            raise UserError(f"{self._where}: unknown field {', '.join(unknown)}; this server would have to ignore it. Leave it out")
