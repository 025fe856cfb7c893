"""How long the event loop was held up: the longest time between a timer's due time and its callback.

Every trial shares one event loop with the training loop. What blocks it blocks them all, so the longest gap is a metric of each step.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

PERIOD_S = 0.1


class LagMeter:
    """Measures while the `async with` block runs.

    async with GapMeter() as gaps:
        ...
        gaps.take()  # the longest gap in seconds since the block began or the last call
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._longest_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LagMeter:
        self._schedule()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> float:
        """The longest gap so far, one that the timer has not seen yet included; the measurement begins anew."""
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
