"""The watchdog limits the time of every call to the server.

The Tinker SDK retries for minutes without reporting errors. The watchdog therefore also sends regular health
checks:

    health checks fail for heartbeat_timeout_s, or the weights are lost  ->  every call raises ServerLost
    one call has no answer for request_timeout_s                         ->  this call raises BackendError
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

from src.core.errors import BackendError, ServerLost
from src.core.trajectory import Turn
from src.policy.options import WatchdogOptions
from src.policy.sampling_policy import Policy, PolicyWrapper, ReferenceModel, SampleRequest

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 5.0
WARNING_PERIOD_S = 30.0


class Watchdog:
    """Awaits calls to the server and raises ServerLost if the server is lost. Create it with `watching`."""

    def __init__(self, options: WatchdogOptions, lost: asyncio.Future[str]) -> None:
        self._options = options
        self._lost = lost

    async def answer[T](self, work: Awaitable[T], action: str) -> T:
        """Return the result of one call to the server.

        Raises ServerLost, BackendError after `request_timeout_s`, or an error of `work`. The messages of
        ServerLost and of this BackendError begin with `action`.
        """
        return await self.guard(work, action, timeout_s=self._options.request_timeout_s)

    async def guard[T](self, work: Awaitable[T], action: str, *, timeout_s: float | None = None) -> T:
        """Return the result of `work`. Without `timeout_s`, `work` limits its own time. Raises ServerLost or
        an error of `work`."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._lost.done():
                raise ServerLost(f"{action}: {self._lost.result()}")
            raise BackendError(f"{action}: no answer within request_timeout_s={timeout_s:g}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


@asynccontextmanager
async def watching(
    check: Callable[[], Awaitable[None]], options: WatchdogOptions
) -> AsyncGenerator[Watchdog]:
    """Yield a watchdog that checks the server with `check` while the block runs.

    `check` raises BackendError if the server does not answer, or ServerLost if the run cannot continue on
    the server.
    """
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    checking = asyncio.create_task(_check_health(check, options, lost))
    try:
        yield Watchdog(options, lost)
    finally:
        checking.cancel()
        await asyncio.wait({checking})
        lost.cancel()


async def _check_health(
    check: Callable[[], Awaitable[None]], options: WatchdogOptions, lost: asyncio.Future[str]
) -> None:
    now = asyncio.get_running_loop().time
    # The time of the first failed check since the last answer. The time of the last answer is not used,
    # because a suspension of this process would then count as time without an answer.
    failing_since: float | None = None
    warned_at = -inf
    while not lost.done():
        await asyncio.sleep(min(CHECK_PERIOD_S, options.heartbeat_timeout_s / 4))
        checked_at = now()
        try:
            await check()
            failing_since, warned_at = None, -inf
        except ServerLost as error:
            lost.set_result(str(error))
        except Exception as error:
            failing_since = failing_since or checked_at
            silent_s = now() - failing_since
            if now() - warned_at >= WARNING_PERIOD_S:
                warned_at = now()
                logger.warning(
                    "health checks have failed for %.0f s; the server counts as lost after "
                    "heartbeat_timeout_s=%g: %s",
                    silent_s,
                    options.heartbeat_timeout_s,
                    error,
                )
            if silent_s >= options.heartbeat_timeout_s:
                lost.set_result(
                    "the server has passed no health check for "
                    f"heartbeat_timeout_s={options.heartbeat_timeout_s:g} ({error})"
                )


class WatchedPolicy(PolicyWrapper):
    """A policy whose calls the watchdog limits."""

    def __init__(self, policy: Policy, watchdog: Watchdog) -> None:
        super().__init__(policy)
        self.watchdog = watchdog

    async def sample(self, request: SampleRequest) -> Turn:
        return await self.watchdog.answer(super().sample(request), "sampling")


class WatchedReference:
    """A reference model whose calls the watchdog limits."""

    def __init__(self, model: ReferenceModel, watchdog: Watchdog) -> None:
        self._model = model
        self._watchdog = watchdog

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._watchdog.answer(self._model.logprobs(token_ids), "computing logprobs")
