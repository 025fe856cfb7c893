"""Counts XLA programs by name as jax compiles them or reads them from the persistent cache."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"  # includes reads of the persistent cache
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

_programs: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_cache_hits: Counter[str] = Counter()


@cache
def watch() -> None:
    """Start to count. jax cannot remove listeners, so the counts include all programs of the process."""
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)


def programs() -> dict[str, int]:
    """Return how many programs of each name this process has compiled or read."""
    return dict(_programs)


def seconds() -> dict[str, float]:
    """Return the time spent on compiling or reading programs, by name."""
    return dict(_seconds)


def cache_hits() -> int:
    """Return how many programs came from the persistent cache."""
    return _cache_hits.total()


def _on_duration(event: str, duration_secs: float, **details: str | int) -> None:
    if event == _BACKEND_COMPILE:
        name = str(details.get("fun_name", "unnamed"))
        _programs[name] += 1
        _seconds[name] += duration_secs


def _on_event(event: str, **details: str | int) -> None:
    if event == _CACHE_HIT:
        _cache_hits[event] += 1
