"""`present`, for optional results that a test has requested."""

from __future__ import annotations


def present[T](value: T | None) -> T:
    """Check that a value is not None."""
    assert value is not None
    return value
