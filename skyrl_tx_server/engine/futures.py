"""Futures of submitted operations, which clients poll by request id.

The store recognises a repeated request by its key. It returns the id of the first request and does not run
the operation again. The store keeps a finished future for a grace period after its delivery, because the
reply may get lost. It removes finished futures earlier if their number or their bytes exceed a limit. A poll
for a removed future fails with FutureLostError. When the store removes the future of a sample request, it
also removes the key. If the client repeats this request, the operation runs again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_tx_server.engine.operations import ForwardBackwardResult, OpResult, SampleResult, TopkLogprobs
from skyrl_tx_server.errors import FutureLostError, ServerError, StorageError, UserError

logger = logging.getLogger(__name__)

MAX_KEYS_PER_SCOPE = 200_000
"""The maximum number of keys of a scope (`RequestKey.scope`). If there are more, the oldest key is removed.
If a client repeats the request of a removed key, the request runs again."""
FAILURE_SIZE = 500
"""Estimated bytes of a stored error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKey:
    """Identifies a request, so that a repeated request is recognised."""

    scope: str
    """A sampler id, a model id, or SESSION:train for requests that create a model. All of them begin with the
    session id."""
    seq_id: int  # the client's number of the request within the scope


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result or the error with which a request ended."""

    kind: str  # the request's type, e.g. "optim_step"
    result: OpResult | None
    error: ServerError | None
    extra: dict[str, str]  # fields that the HTTP route adds to the reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The waiting time of a poll, the time for which a delivered result is kept, and the limits on the number
    and the size of finished results."""

    hold_s: float = 35.0  # maximum wait of a poll; the timeout of the SDK is 45 s
    grace_s: float = 120.0  # time for which a result is kept after its delivery
    max_finished: int = 50_000
    max_bytes: int = 1 << 30  # estimated memory of all finished results


@dataclass(kw_only=True, slots=True)
class _Entry:
    kind: str
    extra: dict[str, str]
    session_id: str | None
    running: concurrent.futures.Future[Any]
    # `cancel` calls this function, because `running.cancel()` cannot end an operation that has started.
    withdraw: Callable[[], None]
    key: RequestKey | None = None
    abandoned: bool = False  # no client waits for the result
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # set when the operation or the server ends
    outcome: Outcome | None = None
    size: int = 0
    delivered_at: float | None = None


class FutureStore:
    """The futures of one tenant. All methods run on the event loop. The thread that ends an operation
    schedules `_finish` on the loop."""

    def __init__(self, retention: Retention, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention = retention
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._keys: dict[str, OrderedDict[int, tuple[str, str]]] = {}  # scope -> seq_id -> (kind, request_id)
        self._delivered: OrderedDict[str, None] = OrderedDict()  # finished and delivered, oldest first
        self._waiting: OrderedDict[str, None] = OrderedDict()  # finished and not delivered, oldest first
        self._bytes = 0
        self._evicted = 0
        self._closed = False

    def share(self, parts: int) -> FutureStore:
        """Return an empty store for a tenant, with a fraction 1 / `parts` of this store's limits."""
        max_finished, max_bytes = self._retention.max_finished // parts, self._retention.max_bytes // parts
        return FutureStore(
            replace(self._retention, max_finished=max_finished, max_bytes=max_bytes), clock=self._clock
        )

    def submit[R: OpResult](
        self,
        start: Callable[[], concurrent.futures.Future[R]],
        *,
        kind: str,
        key: RequestKey | None,
        session_id: str | None = None,
        extra: dict[str, str] | None = None,
        when_done: Callable[[Outcome], None] | None = None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> str:
        """Call `start` and return a new request id. If an earlier request has the same `key`, return the id
        of that request and do not call `start`.

        `when_done` is called with the outcome on the event loop. `withdraw` is called when the client no
        longer waits for the result. If `start` raises, nothing is recorded. Raises UserError if `key` belongs
        to a request of another kind.
        """
        if key is not None and (earlier_id := self.find(key, kind=kind)) is not None:
            return earlier_id
        future = start()
        request_id = f"{kind}-{uuid.uuid4().hex}"
        self._entries[request_id] = _Entry(
            kind=kind, extra=extra or {}, session_id=session_id, running=future, withdraw=withdraw, key=key
        )
        if key is not None:
            scope = self._keys.setdefault(key.scope, OrderedDict())
            scope[key.seq_id] = (kind, request_id)
            if len(scope) > MAX_KEYS_PER_SCOPE:
                scope.popitem(last=False)
        loop = asyncio.get_running_loop()

        def hand_over(done: concurrent.futures.Future[R]) -> None:
            try:
                loop.call_soon_threadsafe(self._finish, request_id, done, when_done)
            except RuntimeError:  # the loop is closed: the server has stopped
                logger.debug("%s finished after the event loop was closed", request_id)

        future.add_done_callback(hand_over)
        return request_id

    def find(self, key: RequestKey, *, kind: str) -> str | None:
        """Return the id of an earlier request with this key, or None if there is none. Raise UserError if the
        earlier request is of another kind."""
        earlier = self._keys.get(key.scope, {}).get(key.seq_id)
        if earlier is None:
            return None
        earlier_kind, request_id = earlier
        if earlier_kind != kind:
            raise UserError(
                f"seq_id {key.seq_id} of {key.scope} is used by an earlier {earlier_kind} request; give each "
                f"request its own seq_id"
            )
        return request_id

    def session_of(self, request_id: str) -> str | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.session_id

    async def wait(
        self, request_id: str, before_delivery: Callable[[Outcome], Awaitable[None]] | None = None
    ) -> Outcome | None:
        """Wait for the outcome and for `before_delivery(outcome)`, and return the outcome. It counts as
        delivered. Return None if the hold time passes, or if the server stops before the request has ended.
        Raise FutureLostError for an unknown id."""
        entry = self._entries.get(request_id)
        if entry is None:
            raise FutureLostError(
                f"no request {request_id}: the server was restarted, or the result of the request was "
                "removed (a while after its delivery, or because the results exceeded the limits of the "
                "store); if it was a sample request, send it again"
            )
        try:
            async with asyncio.timeout(self._retention.hold_s):
                if not self._closed:
                    await entry.woken.wait()
                if entry.outcome is not None and before_delivery is not None:
                    await before_delivery(entry.outcome)
        except TimeoutError:
            return None
        if entry.outcome is not None:
            self._count_as_delivered(request_id, entry)
        return entry.outcome

    def prune(self) -> None:
        """Remove the delivered results whose grace period has ended."""
        deadline = self._clock() - self._retention.grace_s
        while self._delivered:
            request_id = next(iter(self._delivered))
            delivered_at = self._entries[request_id].delivered_at
            if delivered_at is None or delivered_at > deadline:
                return
            self._drop(request_id)

    def abandon(self, session_id: str) -> None:
        """Withdraw all requests of a session that ended, and remove its keys. Finished results are kept for
        the grace period."""
        for scope in [scope for scope in self._keys if scope.split(":")[0] == session_id]:
            del self._keys[scope]
        for request_id, entry in list(self._entries.items()):
            if entry.session_id == session_id:
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Withdraw a request whose client no longer waits. Ignore an unknown id."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.abandoned = True
        entry.running.cancel()
        entry.withdraw()
        if entry.outcome is not None:
            self._count_as_delivered(request_id, entry)

    def close(self) -> None:
        """Make all waiting polls return, because the server is stopping."""
        self._closed = True
        for entry in self._entries.values():
            entry.woken.set()

    def stats(self) -> dict[str, int]:
        finished = len(self._delivered) + len(self._waiting)
        return {
            "pending": len(self._entries) - finished,
            "finished": finished,
            "finished_bytes": self._bytes,
            "evicted_undelivered": self._evicted,
        }

    def _finish(
        self,
        request_id: str,
        done: concurrent.futures.Future[Any],
        when_done: Callable[[Outcome], None] | None,
    ) -> None:
        entry = self._entries[request_id]
        result, error = None, None
        if done.cancelled():
            error = ServerError(
                f"{entry.kind} was withdrawn before it started: the client cancelled it, or its session ended"
            )
        elif (raised := done.exception()) is None:
            result = done.result()
        elif isinstance(raised, ServerError):
            error = raised
        else:
            logger.error("%s failed with an unexpected error", entry.kind, exc_info=raised)
            error = ServerError(f"{entry.kind} failed on the server: {type(raised).__name__}: {raised}")
        entry.outcome = Outcome(kind=entry.kind, result=result, error=error, extra=entry.extra)
        entry.size = FAILURE_SIZE if result is None else result_size(result)
        self._bytes += entry.size
        self._waiting[request_id] = None
        if error is not None:
            level = logging.WARNING if isinstance(error, StorageError) else logging.INFO
            logger.log(level, "%s failed (%s): %s", entry.kind, error.category, error)
        if when_done is not None:
            try:
                when_done(entry.outcome)
            except Exception as failure:  # for example a full disk; the client must get the error
                expected = isinstance(failure, ServerError | OSError)
                logger.error(
                    "%s succeeded, but could not be recorded: %s",
                    entry.kind,
                    failure,
                    exc_info=None if expected else failure,
                )
                recorded = f"{entry.kind} succeeded, but the server could not record it: {failure}"
                error = failure if isinstance(failure, ServerError) else ServerError(recorded)
                entry.outcome = Outcome(kind=entry.kind, result=None, error=error, extra=entry.extra)
        entry.woken.set()
        if entry.abandoned:
            self._count_as_delivered(request_id, entry)
        self._make_room()

    def _count_as_delivered(self, request_id: str, entry: _Entry) -> None:
        if entry.delivered_at is None and request_id in self._waiting:
            entry.delivered_at = self._clock()
            del self._waiting[request_id]
            self._delivered[request_id] = None

    def _make_room(self) -> None:
        """Remove results above the limits, delivered ones first. Count each removed result that was not
        delivered."""
        self.prune()
        while (
            len(self._delivered) + len(self._waiting) > self._retention.max_finished
            or self._bytes > self._retention.max_bytes
        ):
            if self._delivered:
                self._drop(next(iter(self._delivered)))
            elif len(self._waiting) > 1:  # always keep the newest result
                self._evicted += 1
                self._drop(next(iter(self._waiting)))
            else:
                return

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._bytes -= entry.size
        # Remove only the keys of sample requests. A sample request may run again, but a training request must
        # never run twice.
        if entry.key is not None and entry.kind == "sample":
            scope = self._keys.get(entry.key.scope, OrderedDict())
            if scope.get(entry.key.seq_id) == (entry.kind, request_id):
                del scope[entry.key.seq_id]
            if not scope:
                self._keys.pop(entry.key.scope, None)
        self._delivered.pop(request_id, None)
        self._waiting.pop(request_id, None)


def result_size(result: OpResult) -> int:
    """Return an estimate of the bytes that a finished future keeps in memory."""
    match result:
        case SampleResult():
            prompt = 0 if result.prompt_logprobs is None else result.prompt_logprobs.nbytes
            targets = (
                0
                if result.target_prompt_logprobs is None
                else 4 * result.target_prompt_logprobs.values.nbytes
            )
            sequences = sum(
                200 + s.tokens.nbytes + s.logprobs.nbytes + _topk_size(s.topk) for s in result.sequences
            )
            return 200 + prompt + targets + _topk_size(result.topk_prompt_logprobs) + sequences
        case ForwardBackwardResult():
            return 200 + sum(100 + logprobs.nbytes for logprobs in result.logprobs)
        case _:
            return 500


def _topk_size(topk: TopkLogprobs | None) -> int:
    return 0 if topk is None else topk.token_ids.nbytes + topk.logprobs.nbytes
