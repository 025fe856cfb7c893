"""Counts and logs XLA programs as jax compiles them or reads them from the persistent cache."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import cache

import jax

logger = logging.getLogger(__name__)

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"  # includes reads of the persistent cache
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

_MIN_LOGGED_S = 0.1
"""A compilation is logged if lowering the program took at least this long. Small programs compile quickly."""

_programs: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_cache_hits: Counter[str] = Counter()
_being_compiled: set[str] = set()


@cache
def watch() -> None:
    """Start to count all programs of the process. jax cannot remove the listeners."""
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
    name = str(details.get("fun_name", "unnamed"))
    if event == _LOWERED and duration_secs >= _MIN_LOGGED_S:
        _being_compiled.add(name)
        logger.info("compiling %s", name)
    if event == _BACKEND_COMPILE:
        _programs[name] += 1
        _seconds[name] += duration_secs
        if name in _being_compiled:
            _being_compiled.discard(name)
            logger.info("compiled %s in %.1f s", name, duration_secs)


def _on_event(event: str, **details: str | int) -> None:
    if event == _CACHE_HIT:
        _cache_hits[event] += 1
