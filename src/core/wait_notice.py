"""Messages that explain a long wait and repeat while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLOW_S = 5.0  # a message with the explanation is shown after this time
REPEAT_S = 30.0  # messages without the explanation are shown at multiples of this time

MAY_COMPILE = "the server may compile its programs"


class WaitNotice:
    """Uses timers of the event loop to report what a run waits for. A new wait replaces the previous wait."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, cause: str, *, explanation: str | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Report a wait for `cause` every REPEAT_S, until `stop` is called or `is_over` returns True.

        If `explanation` is given, the first message contains it and is shown after SLOW_S.
        """
        self.stop()
        loop = asyncio.get_running_loop()
        started = loop.time()

        def repeat(next_s: float) -> None:
            self._timer = loop.call_at(started + next_s, still_waiting, next_s)

        def explain() -> None:
            if not is_over():
                self._say(f"waiting for {cause}; {explanation}")
                repeat(REPEAT_S)

        def still_waiting(elapsed_s: float) -> None:
            if not is_over():
                self._say(f"still waiting for {cause} ({elapsed_s:.0f} s)")
                repeat(elapsed_s + REPEAT_S)

        if explanation is None:
            repeat(REPEAT_S)
        else:
            self._timer = loop.call_at(started + SLOW_S, explain)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
