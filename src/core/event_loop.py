"""The lag of the event loop: the time between the due time of a timer and the call of its callback.

All trials and the training loop share one event loop. Code that blocks the event loop delays all of them.
Each step logs the longest lag as `time/max_event_loop_gap_s`. `warn_if_blocked` reports code of the user that
blocks the event loop for long.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from src.core.exception_origin import place_in_users_code

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
BLOCKED_S = 10.0  # default of the argument `limit_s` of `warn_if_blocked`


class LagMeter:
    """Measures the lag while the `async with` block runs.

    async with LagMeter() as lag:
        ...
        lag.take()  # the longest lag in seconds since the previous `take` or the start of the block
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._longest_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LagMeter:
        self._schedule()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> float:
        """Return the longest lag, including that of an overdue timer, and restart the measurement."""
        loop = asyncio.get_running_loop()
        longest = max(self._longest_s, loop.time() - self._due)
        self._longest_s = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._schedule()
        return max(0.0, longest)

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._period_s
        self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._longest_s = max(self._longest_s, asyncio.get_running_loop().time() - self._due)
        self._schedule()


@contextmanager
def warn_if_blocked(limit_s: float = BLOCKED_S) -> Generator[None]:
    """Log one warning each time that the user's code blocks the running event loop for `limit_s` seconds.

    A thread measures the time. The deadline of a trial cannot end a call that blocks the event loop.
    """
    loop, thread, ended = asyncio.get_running_loop(), threading.get_ident(), threading.Event()

    def watch() -> None:
        with suppress(RuntimeError):  # the loop is closed
            while not ended.is_set():
                answered = threading.Event()
                loop.call_soon_threadsafe(answered.set)
                if not answered.wait(limit_s):
                    if place := place_in_users_code(sys._current_frames().get(thread)):  # pyright: ignore[reportPrivateUsage]
                        logger.warning(
                            "%s has blocked the event loop for %g s, and all trials wait for it; call "
                            "blocking functions with `await asyncio.to_thread(...)`",
                            place,
                            limit_s,
                        )
                    answered.wait()
                ended.wait(limit_s / 10)

    threading.Thread(target=watch, name="blocked-loop", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
