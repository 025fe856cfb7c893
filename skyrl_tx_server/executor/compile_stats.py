"""Counts and logs the XLA programs that jax compiles or reads from the persistent cache."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from functools import cache

import jax

logger = logging.getLogger(__name__)

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"  # includes reads of the persistent cache
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

_MIN_LOGGED_TRACE_S, _MIN_LOGGED_S = 0.5, 0.05
"""Tracing a program is logged if it took at least _MIN_LOGGED_TRACE_S seconds. Its compilation is logged if
lowering it took at least _MIN_LOGGED_S seconds. Small programs compile quickly and are not logged."""

PROGRESS_INTERVAL_S = 2.5
"""The time between two log lines about a compilation that has not ended."""

_programs: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
_cache_hits: Counter[str] = Counter()
_being_compiled: dict[int, tuple[str, float]] = {}
"""Thread id -> (name of the program that the thread compiles, monotonic time at which it began)."""
_compilations_changed = threading.Condition()


@cache
def watch() -> None:
    """Start to count all programs of the process. The listeners are never removed. jax calls them in the
    thread that compiles a program."""
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)
    threading.Thread(target=_report_progress, name="compile-progress", daemon=True).start()


def programs() -> dict[str, int]:
    """Return how many programs of each name this process has compiled or read."""
    return dict(_programs)


def seconds() -> dict[str, float]:
    """Return program name -> seconds spent on compiling or reading all programs of this name."""
    return dict(_seconds)


def cache_hits() -> int:
    """Return how many programs came from the persistent cache."""
    return _cache_hits.total()


def _on_duration(event: str, duration_secs: float, **details: str | int) -> None:
    name = str(details.get("fun_name", "unnamed"))
    thread = threading.get_ident()
    if event == _TRACED and duration_secs >= _MIN_LOGGED_TRACE_S:
        logger.info("traced %s in %.1f s", name, duration_secs)
    if event == _LOWERED and duration_secs >= _MIN_LOGGED_S:
        with _compilations_changed:
            _being_compiled[thread] = name, time.monotonic()
            _compilations_changed.notify()
        logger.info("compiling %s", name)
    if event == _BACKEND_COMPILE:
        _programs[name] += 1
        _seconds[name] += duration_secs
        if thread in _being_compiled and _being_compiled[thread][0] == name:
            with _compilations_changed:
                del _being_compiled[thread]
            logger.info("compiled %s in %.1f s", name, duration_secs)


def _report_progress() -> None:
    """Log the running compilations every PROGRESS_INTERVAL_S."""
    while True:
        with _compilations_changed:
            _compilations_changed.wait_for(lambda: _being_compiled)
        time.sleep(PROGRESS_INTERVAL_S)
        now = time.monotonic()
        with _compilations_changed:
            compilations = list(_being_compiled.values())
        for name, start in compilations:
            if now - start >= PROGRESS_INTERVAL_S / 2:
                logger.info("compiling %s: %.0f s so far", name, now - start)


def _on_event(event: str, **details: str | int) -> None:
    if event == _CACHE_HIT:
        _cache_hits[event] += 1
