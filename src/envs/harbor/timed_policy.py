"""A policy that measures the time of its calls, to attribute a timeout to the agent or to the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from src.core.trajectory import TrialTime, Turn
from src.policy.sampling_policy import Policy, PolicyWrapper, SampleRequest

PROBE_TIMEOUT_S = 20.0


class TimedPolicy(PolicyWrapper):
    """A policy that measures the time of its calls."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.unanswered_s = 0.0  # the waiting time of the last cancelled call
        self.spent = TrialTime(started=time.monotonic())
        self._last_prompt: Sequence[int] = ()

    async def sample(self, request: SampleRequest) -> Turn:
        call_started = time.monotonic()
        self._last_prompt = request.prompt_ids
        try:
            turn = await super().sample(request)
        except asyncio.CancelledError:
            self.unanswered_s = time.monotonic() - call_started
            raise
        finally:
            if self.spent.first_completion is not None:
                self.spent.sampling_s += time.monotonic() - call_started
        self.spent.first_completion = self.spent.first_completion or time.monotonic()
        return turn

    async def responds(self) -> bool:
        """Return whether one token is sampled within `PROBE_TIMEOUT_S`.

        If it is, the server works, and the cancelled call was sampling a long answer.
        """
        request = SampleRequest(prompt_ids=self._last_prompt[:1], max_tokens=1, temperature=1.0)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self.policy.sample(request)
        except Exception:
            return False
        return True
