"""`present`: narrows an optional value to its type."""

from __future__ import annotations


def present[T](value: T | None) -> T:
    """Return `value` after a check that it is not None."""
    assert value is not None
    return value
