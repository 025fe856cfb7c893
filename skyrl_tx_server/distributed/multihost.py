"""Runs one model on several processes ("ranks"), usually one per host. Rank 0 schedules the work, and every
rank makes the same calls.

jax needs the same programs in the same order on every rank. Rank 0 therefore sends each call of its executor
to the other ranks before it makes the call itself. Values that depend on the host (files, free memory, random
seeds) come from `broadcast_from_rank0`: rank 0 evaluates a function, and every rank continues with the
result. Only rank 0 reads and writes checkpoints.

    rank 0                                            rank 1
    sampler.decode()            -- Call(decode) -->   sampler.decode()
    ... broadcast_from_rank0    -- arrays -------->   ... broadcast_from_rank0
                                <-- no error ------

If every rank raises a ServerError of the same type, only the current operation fails. In the following cases
the server stops, because device states may have diverged:

- The summaries of a call differ between ranks (see `_Outcome.summary`).
- A process is lost.
- A call raises a SequencesLostError, or an error that is not a ServerError.

Rank 0 reads plain text from the other ranks, never a pickle. The other ranks authenticate each message of
rank 0 (see `channel`) before they unpickle it. In messages to the user, a rank is called a process, as in the
option `process_id`.

This file is long because rank 0 and the other ranks are the two sides of one protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, cast

from skyrl_tx_server.distributed.channel import Channel, TamperedError
from skyrl_tx_server.engine.executor_protocol import (
    ON_ALL_RANKS,
    EngineInfo,
    Executor,
    Job,
    Sampler,
    SequencesLostError,
)
from skyrl_tx_server.engine.operations import Op, OpResult
from skyrl_tx_server.errors import ServerError

logger = logging.getLogger(__name__)

LAST_MESSAGE_S = 2.0
"""The maximum time of each wait after a failure. The ranks wait so that they can send each other the cause of
the failure before one of them exits. jax ends the other processes as soon as rank 0 exits."""
SHUTDOWN_S = 5.0
RESTART_HINT = "start all processes again; saved checkpoints are in checkpoints_dir"
FATAL = "!"
"""The first character of the last message of a rank that cannot continue."""


class RankLostError(ServerError):
    """A process was lost, had a fatal error (see `FATAL`), or ended a call with a summary that differs from
    that of rank 0 (see `_Outcome.summary`). The server cannot continue."""


class RankGroup(Protocol):
    """The interface by which code that runs on every rank gets the same values as rank 0."""

    def broadcast_from_rank0[Value](self, evaluate: Callable[[], Value]) -> Value:
        """Return or raise on every rank what `evaluate` returns or raises on rank 0. With several ranks, an
        error that is not a ServerError becomes a ServerError. Every rank must call this method equally often
        and in the same order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call that every rank makes: a sampler method whose name is in `ON_ALL_RANKS`, or a method of
    `_Operations`."""

    method: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a function returned or raised."""

    value: object = None
    error: Exception | None = None

    @classmethod
    def capture(cls, function: Callable[[], object]) -> _Outcome:
        try:
            return cls(value=function())
        except Exception as error:
            return cls(error=error)

    @classmethod
    def without_device(cls, function: Callable[[], object]) -> _Outcome:
        """A variant of `capture` for a function that uses no device. An error that is not a ServerError, for
        example of the disk, becomes a ServerError, because every rank can raise a ServerError and
        continue."""
        outcome = cls.capture(function)
        if outcome.error is None or isinstance(outcome.error, ServerError):
            return outcome
        logger.error("process 0: %s", outcome.error, exc_info=outcome.error)
        return cls(error=ServerError(_one_line(outcome.error)))

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def summary(self) -> str:
        """Return a text that must be equal on every rank. The text is "" for a result, and the name of the
        type for a ServerError. For a SequencesLostError and for any error that is not a ServerError, it is
        FATAL followed by a message."""
        if self.error is None:
            return ""
        expected = isinstance(self.error, ServerError) and not isinstance(self.error, SequencesLostError)
        return type(self.error).__name__ if expected else f"{FATAL}{_one_line(self.error)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operations:
    """The running operations of one rank, by number."""

    executor: Executor
    running: dict[int, Job[OpResult]] = field(default_factory=dict)

    def make(self, call: Call) -> object:
        """Make a call on this rank's executor."""
        if call.method in ON_ALL_RANKS:
            return getattr(self.executor.sampler, call.method)(*call.args, **call.kwargs)
        return {"run": self.run, "advance": self.advance}[call.method](*call.args)

    def run(self, number: int, op: Op) -> OpResult | None:
        """Start an operation. Return its result, or None if the operation has yielded."""
        self.running[number] = self.executor.run(op)
        return self.advance(number)

    def advance(self, number: int) -> OpResult | None:
        """Continue an operation. Return its result, or None if the operation has yielded again."""
        try:
            future = next(self.running[number])
            assert future is None, "with several ranks, no operation waits for another thread"
            return None
        except StopIteration as finished:
            del self.running[number]
            return finished.value
        except Exception:
            del self.running[number]
            raise


# --- rank 0 ---


class RankZero:
    """Rank 0's connections to the other ranks. A server on a single rank has no connections."""

    def __init__(
        self, connections: Mapping[int, Channel] | None = None, on_lost: Callable[[str], None] = logger.error
    ) -> None:
        """`on_lost` is called at most once, from any thread, with one line that says why the server cannot
        continue."""
        self._connections = dict(connections or {})
        self._on_lost = on_lost
        self._lost: Future[str] = Future()
        self._closing = False
        self._loss_lock, self._send_lock = threading.Lock(), threading.Lock()
        self._replies: dict[int, SimpleQueue[str]] = {rank: SimpleQueue() for rank in self._connections}
        self._listeners = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self._connections
        ]
        for listener in self._listeners:
            listener.start()

    def broadcast_from_rank0[Value](self, evaluate: Callable[[], Value]) -> Value:
        if not self._connections:
            return evaluate()
        outcome = _Outcome.without_device(evaluate)
        self._send(outcome)
        return outcome.unwrap()

    def call_on_all_ranks(self, call: Call, make: Callable[[Call], object]) -> Any:
        """Send the call to the other ranks and make it here with `make`. Return what `make` returns, or raise
        its ServerError. Raises RankLostError in three cases: `make` raises a fatal error, a rank is lost, or
        the summary of a rank differs from that of rank 0."""
        if self._lost.done():
            raise RankLostError(self._lost.result())
        self._send(call)
        outcome = _Outcome.capture(lambda: make(call))
        summary = outcome.summary()
        if summary.startswith(FATAL):
            wait([self._lost], LAST_MESSAGE_S)  # if a lost rank is the cause, report the lost rank
            self._report_loss(f"process 0: {summary.removeprefix(FATAL)}")
        for rank, replies in self._replies.items():
            reply = replies.get()
            if reply != summary:
                self._report_loss(
                    f"the call `{call.method}` ended with {reply or 'a result'} on process {rank}, but with "
                    f"{summary or 'a result'} on process 0: {RESTART_HINT}"
                )
        if self._lost.done():
            raise RankLostError(self._lost.result()) from outcome.error
        return outcome.unwrap()

    def stop(self) -> None:
        """Send the other ranks the message to exit, and wait for them."""
        self._closing = True
        self._send(None)
        self._join_listeners(SHUTDOWN_S)

    def wait_for_exit(self) -> None:
        """Wait until the other ranks have exited by themselves, because jax ends them when rank 0 exits."""
        self._closing = True
        for listener in self._listeners:
            listener.join()

    def _join_listeners(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join(max(0.0, deadline - time.monotonic()))

    def _send(self, message: Call | _Outcome | RankLostError | None) -> None:
        data, lost = pickle.dumps(message), []
        with self._send_lock:
            for rank, connection in self._connections.items():
                try:
                    connection.send_bytes(data)
                except OSError:
                    lost.append(rank)
        for rank in lost:
            self._report_loss(f"process {rank} has disconnected: {RESTART_HINT}")

    def _listen(self, rank: int) -> None:
        """Receive the replies of another rank in a thread, so that the exit of that rank is detected even
        while rank 0 waits for its own devices."""
        connection, replies = self._connections[rank], self._replies[rank]
        try:
            while not (reply := connection.recv_bytes().decode()).startswith(FATAL):
                replies.put(reply)
            connection.poll(LAST_MESSAGE_S)  # wait until the connection ends
            self._report_loss(f"process {rank} failed: {reply.removeprefix(FATAL)}")
        except TamperedError as error:
            self._report_loss(f"process {rank}: {error}: {RESTART_HINT}")
        except (EOFError, OSError):
            self._report_loss(f"process {rank} has disconnected: {RESTART_HINT}")

    def _report_loss(self, reason: str) -> None:
        """Fail all calls to the ranks, and pass `reason` to the other ranks and to `on_lost`. Only the first
        report has an effect, and only before `stop`."""
        with self._loss_lock:
            if self._lost.done() or self._closing:
                return
            self._lost.set_result(reason)
        for replies in self._replies.values():
            replies.put("")  # so that `call_on_all_ranks` stops waiting for a reply
        sender = threading.Thread(target=self._send, args=(RankLostError(reason),), daemon=True)
        sender.start()
        sender.join(LAST_MESSAGE_S)  # not without a limit, because a rank may have stopped reading
        self._join_listeners(LAST_MESSAGE_S)
        self._on_lost(reason)


SINGLE_RANK = RankZero()


class MultihostExecutor:
    """Rank 0's executor in a server with several ranks. Implements `Executor`."""

    def __init__(self, executor: Executor, rank0: RankZero) -> None:
        self._executor = executor
        self._rank0 = rank0
        self._operations = _Operations(executor=executor)
        self._numbers = itertools.count()
        self.sampler = cast(Sampler, _MultihostSampler(executor.sampler, self._call))

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    def stats(self) -> dict[str, object]:
        return self._executor.stats()

    def run(self, op: Op) -> Job[OpResult]:
        number = next(self._numbers)
        result = self._call(Call(method="run", args=(number, op)))
        while result is None:
            yield
            result = self._call(Call(method="advance", args=(number,)))
        return result

    def _call(self, call: Call) -> Any:
        return self._rank0.call_on_all_ranks(call, self._operations.make)


class _MultihostSampler:
    """Makes the calls of `ON_ALL_RANKS` on every rank and all other calls on rank 0 only."""

    def __init__(self, sampler: Sampler, call: Callable[[Call], Any]) -> None:
        self._sampler = sampler
        self._call = call

    def release(self, request_id: int) -> None:
        with contextlib.suppress(RankLostError):  # nothing is left to release
            self._call(Call(method="release", args=(request_id,)))

    def __getattr__(self, name: str) -> Any:
        if name in ON_ALL_RANKS:
            return lambda *args, **kwargs: self._call(Call(method=name, args=args, kwargs=kwargs))
        return getattr(self._sampler, name)


# --- the other ranks ---


class WorkerRank:
    """The connection of a rank other than 0 to rank 0."""

    def __init__(self, connection: Channel, on_lost: Callable[[str], None] = logger.error) -> None:
        """`on_lost` is called from another thread as soon as rank 0 is lost, even during a computation."""
        self._connection = connection
        self._on_lost = on_lost
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._ended = threading.Event()  # set when no further message follows
        threading.Thread(target=self._listen, daemon=True).start()

    def broadcast_from_rank0[Value](self, evaluate: Callable[[], Value]) -> Value:
        outcome = self._receive()
        if not isinstance(outcome, _Outcome):
            raise RankLostError("process 0 has stopped")
        return outcome.unwrap()

    def follow(self, start: Callable[[], Executor]) -> None:
        """Load the model with `start`, and make the calls that rank 0 sends until rank 0 stops.

        Raises RankLostError if any rank is lost. Reports any other fatal error to rank 0 and raises it.
        """
        try:
            operations = _Operations(executor=start())
            while (call := self._receive()) is not None:
                outcome = _Outcome.capture(lambda call=call: operations.make(call))
                summary = outcome.summary()
                if summary.startswith(FATAL) or isinstance(outcome.error, RankLostError):
                    outcome.unwrap()
                self._connection.send_bytes(summary.encode())
        except Exception as error:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(f"{FATAL}{_one_line(error)}".encode())
            if not isinstance(error, ServerError):
                self._ended.wait(LAST_MESSAGE_S)  # if the loss of rank 0 is the cause, `_listen` reports it
            raise

    def _listen(self) -> None:
        """Receive messages in a thread, so that the loss of rank 0 is reported before jax aborts this
        process."""
        try:
            while not self._ended.is_set():
                message = pickle.loads(self._connection.recv_bytes())
                if message is None or isinstance(message, RankLostError):
                    self._ended.set()
                self._messages.put(message)
        except (EOFError, OSError, TamperedError) as error:
            reason = (
                f"process 0: {error}" if isinstance(error, TamperedError) else "process 0 has disconnected"
            )
            self._on_lost(reason)
            self._messages.put(RankLostError(reason))
            self._ended.set()

    def _receive(self) -> Any:
        """Return the next message, which is None if rank 0 stops. Raises RankLostError if a rank is lost."""
        message = self._messages.get()
        if isinstance(message, RankLostError):
            raise message
        return message


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
