"""The watchdog bounds every wait for the server.

The SDK retries for minutes without telling its caller. A probe of the server therefore runs next to every
call:

    probe fails for heartbeat_timeout_s, or says "unknown model"   ->  every wait raises ServerLost
    one call unanswered for request_timeout_s                    ->  that call raises BackendError
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from src.core.errors import BackendError, ServerLost
from src.core.trajectory import Turn
from src.policy.options import WatchdogOptions
from src.policy.sampling_policy import Policy, PolicyWrapper, ReferenceModel, SampleRequest

logger = logging.getLogger(__name__)

PROBE_PERIOD_S = 5.0


class Watchdog:
    """Made by `watching`."""

    def __init__(self, options: WatchdogOptions, lost: asyncio.Future[str]) -> None:
        self._options = options
        self._lost = lost

    async def answer[T](self, work: Awaitable[T], what: str) -> T:
        """The answer of one call to the back end."""
        return await self._first(work, what, timeout_s=self._options.request_timeout_s)

    async def guard[T](self, work: Awaitable[T], what: str) -> T:
        """The result of work that has deadlines of its own, while the server lives."""
        return await self._first(work, what, timeout_s=None)

    async def _first[T](self, work: Awaitable[T], what: str, *, timeout_s: float | None) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._lost.done():
                raise ServerLost(f"{what}: {self._lost.result()}")
            raise BackendError(f"{what}: no answer within request_timeout_s={timeout_s:g}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


@asynccontextmanager
async def watching(check: Callable[[], Awaitable[None]], options: WatchdogOptions) -> AsyncIterator[Watchdog]:
    """A watchdog that probes with `check` while the block runs.

    `check` raises BackendError, or ServerLost when waiting has no point.
    """
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    probing = asyncio.create_task(_probe(check, options, lost))
    try:
        yield Watchdog(options, lost)
    finally:
        probing.cancel()
        await asyncio.wait({probing})
        lost.cancel()


async def _probe(
    check: Callable[[], Awaitable[None]], options: WatchdogOptions, lost: asyncio.Future[str]
) -> None:
    now = asyncio.get_running_loop().time
    failing_since: float | None = (
        None  # not "since the last answer": this process itself may have been held up
    )
    while not lost.done():
        await asyncio.sleep(min(PROBE_PERIOD_S, options.heartbeat_timeout_s / 4))
        asked = now()
        try:
            await check()
            failing_since = None
        except ServerLost as error:
            lost.set_result(str(error))
        except Exception as error:
            failing_since = failing_since or asked
            silent_s = now() - failing_since
            logger.warning("the server did not answer a probe (%s); silent for %.0f s", error, silent_s)
            if silent_s >= options.heartbeat_timeout_s:
                lost.set_result(
                    f"the server has not answered for heartbeat_timeout_s={options.heartbeat_timeout_s:g} "
                    f"({error})"
                )


class WatchedPolicy(PolicyWrapper):
    """A policy whose calls the watchdog bounds."""

    def __init__(self, policy: Policy, watchdog: Watchdog) -> None:
        super().__init__(policy)
        self.watchdog = watchdog

    async def sample(self, request: SampleRequest) -> Turn:
        return await self.watchdog.answer(super().sample(request), "sampling")


class WatchedReference:
    """A reference model whose calls the watchdog bounds."""

    def __init__(self, model: ReferenceModel, watchdog: Watchdog) -> None:
        self._model = model
        self._watchdog = watchdog

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._watchdog.answer(self._model.logprobs(token_ids), "computing logprobs")
