"""The declaration of a metric: its name, unit, reduction and meaning, and the function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    COUNT = "count"
    SHARE = "share"  # between 0 and 1
    REWARD = "reward"
    ADVANTAGE = "advantage"
    TOKENS = "tokens"
    SECONDS = "s"
    TOKENS_PER_SECOND = "tokens/s"
    NATS = "nats"
    UPDATES = "updates"  # versions of the policy's weights; each training step makes one version
    RATIO = "ratio"
    USD = "USD"
    VARIES = "varies"  # depends on the metric, the environment or the server


class Reduction(StrEnum):
    """How the values of one step become the number that is logged."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    STD = "std"
    LAST = "last"  # a single value of the step


@dataclass(frozen=True, slots=True)
class Metric[Source]:
    """One metric, or several metrics with names such as `trials/failed/<kind>`.

    `compute` returns the value, or None if the step has no value. For several metrics it returns a mapping
    from full names to values. `compute` is None if another module computes the metric.
    """

    name: str
    unit: Unit
    reduction: Reduction
    meaning: str
    compute: Callable[[Source], float | Mapping[str, float] | None] | None = None


def measure[Source](metrics: Iterable[Metric[Source]], source: Source) -> dict[str, float]:
    """Return the values of all metrics that have a `compute` function, by name.

    If two metrics give the same name, the value of the later metric is returned.
    """
    values: dict[str, float] = {}
    for metric in metrics:
        value = metric.compute(source) if metric.compute else None
        if isinstance(value, Mapping):
            values |= {name: float(number) for name, number in value.items()}
        elif value is not None:
            values[metric.name] = float(value)
    return values
