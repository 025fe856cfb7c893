"""Bounds of numeric options, declared in the metadata of a chz field."""

from __future__ import annotations

import math
from dataclasses import dataclass

import chz

from skyrl_tx_server.errors import ConfigError

BOUNDS = "bounds"
"""The key of a `Bounds` in the metadata of a field."""
MAX_DEVICES = 1 << 16
MAX_TOKENS = 1 << 30
YEAR_S = 366 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The values that a numeric option accepts."""

    above: float | None = None  # an exclusive lower bound; if None, the inclusive bound `low` applies
    low: float = 0
    high: float

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError if `value` is outside the bounds or not finite."""
        if self.above is not None and not value > self.above:
            raise ConfigError(f"{name}={value}: must be above {self.above:g}")
        if not math.isfinite(value) or not self.low <= value <= self.high:
            lower = f"lie between {self.low:g} and"
            if self.above is not None:
                lower = f"be above {self.above:g} and at most"
            raise ConfigError(f"{name}={value}: must {lower} {self.high:.12g}")


def positive(high: float) -> dict[str, Bounds]:
    """Metadata of an option that must be above 0 and at most `high`."""
    return {BOUNDS: Bounds(above=0, high=high)}


def between(low: float, high: float) -> dict[str, Bounds]:
    """Metadata of an option that must lie between `low` and `high`, both inclusive."""
    return {BOUNDS: Bounds(low=low, high=high)}


@chz.chz
class BoundedOptions:
    """The base of the server's option classes. Its validator runs before the validators of the subclasses."""

    @chz.validate
    def _check_bounds(self) -> None:
        """Raise ConfigError for the first numeric option that is outside its bounds or not finite."""
        for name, field in chz.chz_fields(self).items():
            bounds, value = (field.metadata or {}).get(BOUNDS), getattr(self, name)
            if bounds is not None and value is not None:
                bounds.check(name, value)
