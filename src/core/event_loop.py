"""The lag of the event loop: the time between the due time of a timer and the call of its callback.

All trials and the training loop share one event loop. Code that blocks the event loop delays all of them.
Each step logs the longest lag as `time/max_event_loop_gap_s`.
"""

from __future__ import annotations

import asyncio

PERIOD_S = 0.1


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
