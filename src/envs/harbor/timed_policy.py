"""A policy that measures the time of its calls, to attribute a timeout to the agent or to the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from src.core.trajectory import Turn
from src.policy.sampling_policy import Policy, PolicyWrapper, SampleRequest

PROBE_TIMEOUT_S = 20.0


class TimedPolicy(PolicyWrapper):
    """Passes each call to `policy` and measures its time. The trial's time starts when the object is made."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.unanswered_s = 0.0  # the waiting time of the last cancelled call
        self._started = time.monotonic()
        self._first_completion: float | None = None
        # The duration of the ended calls after the first completion, including calls without a result.
        self._sampling_s = 0.0
        self._call_started: float | None = None  # None: no call is in progress
        self._last_prompt: Sequence[int] = ()

    async def sample(self, request: SampleRequest) -> Turn:
        call_started = self._call_started = time.monotonic()
        self._last_prompt = request.prompt_ids
        try:
            turn = await super().sample(request)
        except asyncio.CancelledError:
            self.unanswered_s = time.monotonic() - call_started
            raise
        finally:
            self._call_started = None
            if self._first_completion is not None:
                self._sampling_s += time.monotonic() - call_started
        self._first_completion = self._first_completion or time.monotonic()
        return turn

    def agent_used_most(self, now: float) -> bool:
        """Return whether the agent used more than half of the time between the start and `now`.

        The agent's time is the time after the first completion, without the time of sampling calls. The
        time of a sampling call that is in progress is left out up to `now`.
        """
        if self._first_completion is None:
            return False
        sampling_s = self._sampling_s + (0.0 if self._call_started is None else now - self._call_started)
        return now - self._first_completion - sampling_s > (now - self._started) / 2

    async def responds(self) -> bool:
        """Return whether the server samples one token within `PROBE_TIMEOUT_S`.

        This method is called if the agent reached its time limit during a sampling call. If the server
        responds, the call is assumed to have sampled a long answer.
        """
        request = SampleRequest(prompt_ids=self._last_prompt[:1], max_tokens=1, temperature=1.0)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self.policy.sample(request)
        except Exception:
            return False
        return True
