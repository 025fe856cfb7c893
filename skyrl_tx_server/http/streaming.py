"""Wait for samples on the event loop, with or without streaming, and withdraw the operations if the client
disconnects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence

from starlette.requests import Request

from skyrl_tx_server.engine.operations import Sample, SampleResult
from skyrl_tx_server.errors import ServerError
from skyrl_tx_server.http.app_state import AppState
from skyrl_tx_server.http.wire.openai_replies import TokenDelta


class StreamWatcher:
    """Passes tokens from the engine thread to the event loop. Implements `engine.Watcher`."""

    def __init__(self, *, streams_tokens: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.streams_tokens = streams_tokens
        self.deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()  # None: the operation has ended
        self.cancelled = False

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._put(TokenDelta(index=index, tokens=list(tokens), logprobs=list(logprobs)))

    def is_waiting(self) -> bool:
        return not self.cancelled

    def cancel(self) -> None:
        """End the operation after its current or next prefill batch or decode dispatch (a program call that
        computes several decode steps). To withdraw an operation that has not started, or one that an external
        sampler (a vLLM or SGLang server) serves, cancel its future too."""
        self.cancelled = True

    def finish(self, future: concurrent.futures.Future[SampleResult]) -> None:
        self._put(None)

    def _put(self, delta: TokenDelta | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self.deltas.put_nowait, delta)


async def stream_tokens(
    state: AppState, op: Sample, results: list[SampleResult]
) -> AsyncGenerator[TokenDelta]:
    """Yield the tokens of `op` as they are sampled, and append the result to `results`. Closing the generator
    withdraws the operation. Raise ServerError if the operation fails."""
    watcher = StreamWatcher(streams_tokens=True)
    future = state.engine.submit(op, watcher)
    future.add_done_callback(watcher.finish)
    num_sent = [0] * op.num_samples
    try:
        while (delta := await watcher.deltas.get()) is not None:
            num_sent[delta.index] += len(delta.tokens)
            yield delta
        result = _sampled(future)
        results.append(result)
        for index, sequence in enumerate(result.sequences):
            unsent = slice(num_sent[index], None)
            yield TokenDelta(
                index=index,
                tokens=sequence.tokens[unsent].tolist(),
                logprobs=sequence.logprobs[unsent].tolist(),
                ended=sequence.stop_reason,
            )
    finally:
        watcher.cancel()
        future.cancel()


async def wait_for_results(
    state: AppState, request: Request, ops: Sequence[Sample]
) -> list[SampleResult] | None:
    """Return the results of `ops`. If the client disconnects first, return None. Raise ServerError if one of
    `ops` is refused or fails. In all cases, withdraw the operations that have not ended."""
    watcher = StreamWatcher(streams_tokens=False)
    futures: list[concurrent.futures.Future[SampleResult]] = []
    try:
        for op in ops:
            futures.append(state.engine.submit(op, watcher))
        results = await unless_disconnected(request, _ended(futures))
        return None if results is None else [_sampled(future) for future in futures]
    finally:
        watcher.cancel()
        for future in futures:
            future.cancel()


async def unless_disconnected[T](request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        disconnected.cancel()
        working.cancel()


async def _ended(
    futures: Sequence[concurrent.futures.Future[SampleResult]],
) -> list[SampleResult | BaseException]:
    """Wait until all `futures` have ended.

    If the future that `gather` returns is cancelled, it has an exception, and asyncio logs this exception
    unless some code reads it. The `await` in this function reads it.
    """
    return await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)


def _sampled(future: concurrent.futures.Future[SampleResult]) -> SampleResult:
    if future.cancelled():
        raise ServerError("the request was withdrawn before it started")
    return future.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
