"""Follow samples from the event loop, either token by token or to their end, and withdraw them if the client
disconnects.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request

from skyrl_tx_server.engine.operations import OpResult, Sample, SampleResult
from skyrl_tx_server.errors import ServerError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.wire.openai_replies import TokenDelta


class StreamWatcher:
    """Passes the reports of the engine's thread to the event loop. Implements `engine.Watcher`."""

    def __init__(self, *, follows: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.follows = follows
        self.news: asyncio.Queue[TokenDelta | None] = asyncio.Queue()  # None: the request has ended
        self.gone = False

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._put(TokenDelta(index=index, tokens=list(tokens), logprobs=list(logprobs)))

    def wanted(self) -> bool:
        return not self.gone

    def leave(self) -> None:
        """Withdraw the request. One that has started ends after the current decode dispatch."""
        self.gone = True

    def over(self, future: concurrent.futures.Future[OpResult]) -> None:
        self._put(None)

    def _put(self, news: TokenDelta | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self.news.put_nowait, news)


async def follow(context: AppState, op: Sample, results: list[SampleResult]) -> AsyncGenerator[TokenDelta]:
    """Yield the tokens of `op` as they are sampled, and append the result to `results`. Leaving early
    withdraws the request.
    """
    listener = StreamWatcher(follows=True)
    future = context.engine.submit(op, listener)
    future.add_done_callback(listener.over)
    seen = [0] * op.num_samples
    try:
        while (news := await listener.news.get()) is not None:
            seen[news.index] += len(news.tokens)
            yield news
        result = _sampled(future)
        results.append(result)
        for index, sequence in enumerate(result.sequences):
            rest = slice(seen[index], None)
            yield TokenDelta(
                index=index,
                tokens=sequence.tokens[rest].tolist(),
                logprobs=sequence.logprobs[rest].tolist(),
                ended=sequence.stop_reason,
            )
    finally:
        listener.leave()
        future.cancel()


async def results_of(context: AppState, request: Request, ops: Sequence[Sample]) -> list[SampleResult] | None:
    """Return the results of `ops`, or None if the client disconnects first, which withdraws them."""
    listener = StreamWatcher(follows=False)
    futures = [context.engine.submit(op, listener) for op in ops]
    leaving = asyncio.create_task(_disconnected(request))
    finished = asyncio.gather(*(asyncio.wrap_future(future) for future in futures), return_exceptions=True)
    try:
        await asyncio.wait({finished, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return [_sampled(future) for future in futures] if finished.done() else None
    finally:
        listener.leave()
        leaving.cancel()
        finished.cancel()


def _sampled(future: concurrent.futures.Future[OpResult]) -> SampleResult:
    if future.cancelled():
        raise ServerError("withdrawn before it began")
    result = future.result()
    assert isinstance(result, SampleResult)
    return result


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
