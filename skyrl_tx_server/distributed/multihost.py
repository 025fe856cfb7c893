"""Several processes, usually one per host, that run one model: process 0 decides, the others do as it does, call by call.

jax wants the same programs in the same order from every process. So process 0 sends each call of its executor to the others before it
makes it itself, and what an executor cannot know from its calls (what lies on disk, how much memory is free, a random seed) it asks
through `agreed`: process 0 finds out, and everyone goes on with what it found. Only process 0 reads and writes checkpoints.

    process 0                             process 1
    decode()              -- Decode -->   decode()
    ... agreed(read)      -- arrays -->   ... agreed(read)
                        <-- no error --

An error raised on purpose is the same everywhere and concerns its operation alone. Any other, and a process that goes, is the end of all:
nobody could say whether the devices still hold the same. Process 0 reads plain text from the others, never a pickle. The others unpickle
what process 0 sends, after they have checked that it is process 0 who sent it (`channel`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from skyrl_tx_server.distributed.channel import Channel, TamperedError
from skyrl_tx_server.engine.engine import (
    EngineInfo,
    Executor,
    FailedRow,
    FinishedRow,
    PrefillResult,
    RowsLostError,
    RunningRow,
)
from skyrl_tx_server.engine.operations import Op, OpResult
from skyrl_tx_server.engine.scheduler import PrefillRequest
from skyrl_tx_server.errors import ServerError

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long a process that fails may take to say so, and the others to hear why all is over: jax ends them as soon as process 0 goes."""
GOODBYE_S = 5.0
GO_ON = "start all processes again; what was saved is in checkpoints_dir"
FATAL = "!"
"""Begins the last message of a process that cannot go on."""


class HostLostError(ServerError):
    """A process has gone or has failed alone; nothing more can be computed."""


class Hosts(Protocol):
    def agreed[Found](self, find_out: Callable[[], Found]) -> Found:
        """What `find_out` returns or raises on process 0, on every process. Called in the same order by all."""
        ...


# --- what process 0 sends -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Admit:
    admits: Sequence[PrefillRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decode:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collect:
    go_on: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pause:
    rows: Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Release:
    request_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begin:
    """Run `op` up to its first yield."""

    job: int
    op: Op


@dataclass(frozen=True, kw_only=True, slots=True)
class _Continue:
    job: int


_Call = _Admit | _Decode | _Collect | _Pause | _Release | _Begin | _Continue


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What a function returned, or raised."""

    value: object = None
    error: Exception | None = None

    @classmethod
    def of(cls, function: Callable[[], object]) -> _Outcome:
        try:
            return cls(value=function())
        except Exception as error:
            return cls(error=error)

    @classmethod
    def found(cls, find_out: Callable[[], object]) -> _Outcome:
        """As `of`, of what touches no device: whatever goes wrong, a disk that is away among it, all raise alike and can go on from."""
        outcome = cls.of(find_out)
        if outcome.error is None or isinstance(outcome.error, ServerError):
            return outcome
        logger.error("process 0: %s", outcome.error, exc_info=outcome.error)
        return cls(error=ServerError(_one_line(outcome.error)))

    def again(self) -> object:
        if self.error is not None:
            raise self.error
        return self.value

    def summary(self) -> str:
        """What must be the same on every process: empty, or the type of an error raised on purpose; FATAL and more for any other."""
        if self.error is None:
            return ""
        on_purpose = isinstance(self.error, ServerError) and not isinstance(self.error, RowsLostError)
        return type(self.error).__name__ if on_purpose else f"{FATAL}{_one_line(self.error)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    """Makes the calls on this process's executor, the same way on every process."""

    executor: Executor
    jobs: dict[int, Generator[None, None, OpResult]] = field(default_factory=dict)

    def make(self, call: _Call) -> object:
        """The call's result; None of an operation that has more steps to go."""
        match call:
            case _Admit():
                return self.executor.admit(call.admits)
            case _Decode():
                return self.executor.decode()
            case _Collect():
                return self.executor.collect(go_on=call.go_on)
            case _Pause():
                return self.executor.pause(call.rows)
            case _Release():
                return self.executor.release(call.request_id)
            case _Begin():
                self.jobs[call.job] = self.executor.run(call.op)
                return self._step(call.job)
            case _Continue():
                return self._step(call.job)

    def _step(self, job: int) -> OpResult | None:
        try:
            return next(self.jobs[job])
        except StopIteration as finished:
            del self.jobs[job]
            return finished.value
        except Exception:
            del self.jobs[job]
            raise


# --- process 0 ------------------------------------------------------------------------------------------------------


class RankZero:
    """Process 0's connections to the others; without any it is a server on one host."""

    def __init__(
        self, followers: Mapping[int, Channel] | None = None, on_lost: Callable[[str], None] = logger.error
    ) -> None:
        """`on_lost` is told, once and from any thread, in one line why nothing can go on."""
        self._followers = dict(followers or {})
        self._on_lost = on_lost
        self._lost: Future[str] = Future()
        self._closing = False
        self._losing, self._sending = threading.Lock(), threading.Lock()
        self._answers: dict[int, SimpleQueue[str]] = {process: SimpleQueue() for process in self._followers}
        self._listeners = [
            threading.Thread(target=self._listen, args=(process,), daemon=True) for process in self._followers
        ]
        for listener in self._listeners:
            listener.start()

    def agreed[Found](self, find_out: Callable[[], Found]) -> Found:
        if not self._followers:
            return find_out()
        outcome = _Outcome.found(find_out)
        self._send(outcome)
        return outcome.again()  # type: ignore[return-value]

    def together(self, call: _Call, worker: _Worker) -> object:
        """The call made here and on every other process. HostLostError when that is not possible any more."""
        if self._lost.done():
            raise HostLostError(self._lost.result())
        self._send(call)
        outcome = _Outcome.of(lambda: worker.make(call))
        ended = outcome.summary()
        if ended.startswith(FATAL):
            wait(
                [self._lost], LAST_WORDS_S
            )  # our call fails when another process dies, and that it died is the better news
            self._lose(f"process 0: {ended.removeprefix(FATAL)}")
        for process, answers in self._answers.items():
            answer = answers.get()
            if answer != ended:
                name = type(call).__name__
                self._lose(
                    f"process {process} answered {name} with {answer or 'a result'}, process 0 with {ended or 'a result'}"
                )
        if self._lost.done():
            raise HostLostError(self._lost.result()) from outcome.error
        return outcome.again()

    def stop(self) -> None:
        """Tell the others that it is over, and see them off."""
        self._closing = True
        self._send(None)
        self._see_off(GOODBYE_S)

    def _see_off(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join(max(0.0, deadline - time.monotonic()))

    def _send(self, message: _Call | _Outcome | HostLostError | None) -> None:
        data, gone = pickle.dumps(message), []
        with self._sending:
            for process, connection in self._followers.items():
                try:
                    connection.send_bytes(data)
                except OSError:
                    gone.append(process)
        for process in gone:
            self._lose(f"process {process} has gone: {GO_ON}")

    def _listen(self, process: int) -> None:
        """One thread per process, so that its end is known at once, whatever our own devices wait for."""
        connection, answers = self._followers[process], self._answers[process]
        try:
            while not (said := connection.recv_bytes().decode()).startswith(FATAL):
                answers.put(said)
            connection.poll(LAST_WORDS_S)  # until it has gone
            self._lose(f"process {process} failed: {said.removeprefix(FATAL)}")
        except TamperedError as error:
            self._lose(f"process {process}: {error}: {GO_ON}")
        except (EOFError, OSError):
            self._lose(f"process {process} has gone: {GO_ON}")

    def _lose(self, reason: str) -> None:
        with self._losing:
            if self._lost.done() or self._closing:
                return
            self._lost.set_result(reason)
        for answers in self._answers.values():
            answers.put("")  # whoever waits for an answer finds that all is lost
        farewell = threading.Thread(target=self._send, args=(HostLostError(reason),), daemon=True)
        farewell.start()
        farewell.join(LAST_WORDS_S)  # somebody may not be listening
        self._see_off(LAST_WORDS_S)
        self._on_lost(reason)


ALONE = RankZero()


class MultihostExecutor:
    """Process 0's executor, whose every call is made on all processes. Implements `engine.Executor`."""

    def __init__(self, executor: Executor, leader: RankZero) -> None:
        self._executor = executor
        self._leader = leader
        self._worker = _Worker(executor=executor)
        self._jobs = itertools.count()

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    @property
    def num_slots(self) -> int:
        return self._executor.num_slots

    @property
    def rows_decoding(self) -> int:
        return self._executor.rows_decoding

    @property
    def unfinished_tokens(self) -> int:
        return self._executor.unfinished_tokens

    def running(self, request_id: int) -> Sequence[RunningRow]:
        return self._executor.running(request_id)

    def stats(self) -> dict[str, object]:
        return self._executor.stats()

    def admit(self, admits: Sequence[PrefillRequest]) -> Sequence[PrefillResult | None]:
        return self._leader.together(_Admit(admits=admits), self._worker)  # type: ignore[return-value]

    def decode(self) -> bool:
        return self._leader.together(_Decode(), self._worker)  # type: ignore[return-value]

    def collect(self, *, go_on: bool) -> Sequence[FinishedRow | FailedRow]:
        return self._leader.together(_Collect(go_on=go_on), self._worker)  # type: ignore[return-value]

    def pause(self, rows: Sequence[tuple[int, int]]) -> None:
        self._leader.together(_Pause(rows=rows), self._worker)

    def release(self, request_id: int) -> None:
        with contextlib.suppress(HostLostError):  # nothing is held any more
            self._leader.together(_Release(request_id=request_id), self._worker)

    def run(self, op: Op) -> Generator[None, None, OpResult]:
        job = next(self._jobs)
        result = self._leader.together(_Begin(job=job, op=op), self._worker)
        while result is None:
            yield
            result = self._leader.together(_Continue(job=job), self._worker)
        return result  # type: ignore[return-value]


# --- the others -----------------------------------------------------------------------------------------------------


class Follower:
    """A process's connection to process 0."""

    def __init__(self, connection: Channel, on_lost: Callable[[str], None] = logger.error) -> None:
        """`on_lost` is told from a thread of its own, whatever this process computes, that process 0 has gone without a word."""
        self._connection = connection
        self._on_lost = on_lost
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._over = threading.Event()  # nothing more comes
        threading.Thread(target=self._listen, daemon=True).start()

    def agreed[Found](self, find_out: Callable[[], Found]) -> Found:
        outcome = self._receive()
        if not isinstance(outcome, _Outcome):
            raise HostLostError("process 0 has stopped")
        return outcome.again()  # type: ignore[return-value]

    def follow(self, start: Callable[[], Executor]) -> None:
        """Do as process 0 does, from loading the model until it says that it is over. HostLostError when it goes without a word."""
        try:
            worker = _Worker(executor=start())
            while (call := self._receive()) is not None:
                outcome = _Outcome.of(lambda call=call: worker.make(call))
                summary = outcome.summary()
                if summary.startswith(FATAL) or isinstance(outcome.error, HostLostError):
                    outcome.again()
                self._connection.send_bytes(summary.encode())
        except Exception as error:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(f"{FATAL}{_one_line(error)}".encode())
            if not isinstance(error, ServerError):
                self._over.wait(
                    LAST_WORDS_S
                )  # our call fails when process 0 dies, and that it died is the better news
            raise

    def _listen(self) -> None:
        """jax aborts this process soon after process 0 has died, so that has to be known at once."""
        try:
            while not self._over.is_set():
                message = pickle.loads(self._connection.recv_bytes())
                if message is None or isinstance(message, HostLostError):
                    self._over.set()
                self._messages.put(message)
        except (EOFError, OSError, TamperedError) as error:
            lost = HostLostError(
                f"process 0: {error}" if isinstance(error, TamperedError) else "process 0 has gone"
            )
            self._on_lost(str(lost))
            self._messages.put(lost)
            self._over.set()

    def _receive(self) -> Any:
        """The next message. HostLostError: none will come any more."""
        message = self._messages.get()
        if isinstance(message, HostLostError):
            raise message
        return message


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
