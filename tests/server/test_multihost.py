"""Two server processes, as two threads with executors without devices."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np
import pytest

from skyrl_tx_server.distributed.multihost import Call, MultihostExecutor, RankLostError, RankZero, WorkerRank
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.executor_protocol import SequencesLostError
from skyrl_tx_server.engine.operations import (
    CreateModel,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Op,
    OpResult,
    Sample,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.errors import ServerError, UserError
from tests.fakes.channel import channels
from tests.fakes.executor import FakeExecutor

CREATE = CreateModel(model_id="m", lora=LoraSpec(rank=4))
SAMPLE = Sample(
    weights=None, prompt=np.array([5, 6], np.int32), settings=SamplingSettings(max_tokens=4), num_samples=2
)


@dataclass(kw_only=True)
class Pair:
    """The connection of process 0, and the end of the other process."""

    rank0: RankZero
    executor: MultihostExecutor
    own: FakeExecutor
    other: FakeExecutor
    lost: SimpleQueue[str]
    end: SimpleQueue[Exception | None]  # how the other process ended

    def run(self, op: Op) -> object:
        job = self.executor.run(op)
        while True:
            try:
                next(job)
            except StopIteration as finished:
                return finished.value


@dataclass(kw_only=True)
class _Started:
    pairs: list[Pair] = field(default_factory=list)

    def __call__(self, find_out: Callable[[WorkerRank], object] | None = None) -> Pair:
        ours, theirs = channels()
        lost, end = SimpleQueue[str](), SimpleQueue[Exception | None]()
        own, other, worker = FakeExecutor(), FakeExecutor(), WorkerRank(theirs)

        def start() -> FakeExecutor:
            if find_out is not None:
                find_out(worker)
            return other

        def follow() -> None:
            try:
                worker.follow(start)
                end.put(None)
            except Exception as error:
                end.put(error)
            theirs.shut_down()

        threading.Thread(target=follow, daemon=True).start()
        rank0 = RankZero({1: ours}, lost.put)
        pair = Pair(
            rank0=rank0, executor=MultihostExecutor(own, rank0), own=own, other=other, lost=lost, end=end
        )
        self.pairs.append(pair)
        return pair


@pytest.fixture
def started() -> Iterator[_Started]:
    made = _Started()
    yield made
    for pair in made.pairs:
        pair.rank0.stop()


def forward_backward(*lengths: int) -> ForwardBackward:
    data = tuple(
        TrainDatum(tokens=np.zeros(length, np.int32), target_tokens=np.zeros(length, np.int32))
        for length in lengths
    )
    return ForwardBackward(model_id="m", data=data, loss_fn=LossFn.CROSS_ENTROPY)


def test_every_process_makes_the_same_calls_in_the_same_order(started: _Started) -> None:
    pair = started()
    engine = Engine(pair.executor)
    engine.start()
    waiting = [engine.submit(op) for op in (CREATE, SAMPLE, forward_backward(3, 4, 5), SAMPLE)]
    results = [future.result(60) for future in waiting]
    engine.stop()
    pair.rank0.stop()
    assert pair.end.get(timeout=60) is None
    assert len(pair.own.log) >= 8 and pair.other.log == pair.own.log
    assert len(results[2].logprobs) == 3 and len(results[3].sequences) == 2  # type: ignore[union-attr]


class Submits:
    """A watcher that submits a sample of another tenant after its first tokens."""

    streams_tokens = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.submitted: Future[OpResult] | None = None

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if self.submitted is None:
            self.submitted = self._engine.submit(SAMPLE, tenant="b")

    def is_waiting(self) -> bool:
        return True


def test_sequences_are_paused_on_every_process(started: _Started) -> None:
    pair = started()
    engine = Engine(pair.executor)
    engine.start()
    watcher = Submits(engine)
    large = replace(SAMPLE, settings=SamplingSettings(max_tokens=40), num_samples=8)
    result = engine.submit(large, watcher, tenant="a").result(60)
    assert watcher.submitted is not None
    watcher.submitted.result(60)
    engine.stop()
    pair.rank0.stop()
    assert pair.end.get(timeout=60) is None
    assert any(entry.startswith("pause") for entry in pair.own.log) and pair.other.log == pair.own.log
    assert isinstance(result, SampleResult)
    assert [list(sequence.tokens) for sequence in result.sequences] == [list(range(7, 47))] * 8


def test_a_server_error_fails_only_its_operation(started: _Started) -> None:
    pair = started()
    pair.run(CREATE)
    for executor in (pair.own, pair.other):
        executor.errors["create n"] = UserError("not this one")
    with pytest.raises(UserError, match="not this one"):
        pair.run(CreateModel(model_id="n", lora=LoraSpec(rank=4)))
    assert len(pair.run(forward_backward(3)).logprobs) == 1  # type: ignore[attr-defined]
    assert pair.lost.empty()


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        (None, RuntimeError("out of memory\nand so on"), "process 1 failed: RuntimeError: out of memory"),
        (RuntimeError("out of memory"), None, "process 0: RuntimeError: out of memory"),
        (None, UserError("no"), "process 1 answered run with UserError, process 0 with a result"),
        (UserError("no"), None, "process 1 answered run with a result, process 0 with UserError"),
        (
            SequencesLostError("gone"),
            SequencesLostError("gone"),
            "process 1 failed: SequencesLostError: gone",
        ),
    ],
)
def test_an_error_of_one_process_alone_stops_the_server(
    started: _Started,
    own: Exception | None,
    other: Exception | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # After its own failure, process 0 waits for the other process or for nothing.
    comes = isinstance(other, SequencesLostError)
    monkeypatch.setattr("skyrl_tx_server.distributed.multihost.LAST_MESSAGE_S", 60 if comes else 0.2)
    pair = started()
    for executor, error in ((pair.own, own), (pair.other, other)):
        if error is not None:
            executor.errors["create m"] = error
    with pytest.raises(RankLostError, match=reason):
        pair.run(CREATE)
    assert pair.lost.get(timeout=60) == reason
    assert isinstance(
        pair.end.get(timeout=60), type(other) if reason.startswith("process 1 failed") else RankLostError
    )


def test_a_lost_process_fails_waiting_operations_at_once() -> None:
    ours, theirs = channels()
    # The devices of this process never return.
    lost, own = (
        SimpleQueue[str](),
        FakeExecutor(gate=threading.Event()),
    )
    rank0 = RankZero({1: ours}, lost.put)
    executor = MultihostExecutor(own, rank0)
    engine = Engine(executor)
    engine.start()
    stuck, queued = engine.submit(CREATE), engine.submit(SAMPLE)
    theirs.recv_bytes()  # the operation has started
    theirs.close()
    reason = lost.get(timeout=60)
    hint = "start all processes again; saved checkpoints are in checkpoints_dir"
    assert reason == f"process 1 has disconnected: {hint}"
    engine.abandon(reason)
    for future in (stuck, queued):
        with pytest.raises(ServerError, match=reason):
            future.result(60)
    with pytest.raises(RankLostError, match=reason):
        executor.sampler.decode()
    executor.sampler.release(1)  # raises no error, because no sequence is held
    assert own.gate is not None
    own.gate.set()
    engine.stop()
    rank0.stop()


def test_the_loss_of_process_0_is_detected_during_a_call() -> None:
    ours, theirs = channels()
    # The devices of the other process never return.
    lost, other = (
        SimpleQueue[str](),
        FakeExecutor(gate=threading.Event()),
    )
    worker = WorkerRank(theirs, lost.put)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(worker.follow, lambda: other)
        ours.send_bytes(pickle.dumps(Call(method="run", args=(0, CREATE))))
        ours.close()
        assert lost.get(timeout=60) == "process 0 has disconnected"
        assert not following.done() and other.gate is not None
        other.gate.set()
        assert isinstance(following.exception(60), RankLostError | OSError)


def test_every_process_gets_the_value_of_process_0(started: _Started) -> None:
    received = []

    def refused() -> int:
        raise UserError("no such checkpoint")

    def away() -> int:
        raise OSError(116, "Stale file handle")

    def ask(worker: WorkerRank) -> None:
        received.append(worker.broadcast_from_rank0(lambda: 1))
        with pytest.raises(UserError, match="no such checkpoint"):
            worker.broadcast_from_rank0(lambda: 2)
        # An intended error, which concerns only its operation.
        with pytest.raises(ServerError, match="Stale file handle"):
            worker.broadcast_from_rank0(lambda: 3)

    pair = started(ask)
    assert pair.rank0.broadcast_from_rank0(lambda: 7) == 7
    with pytest.raises(UserError, match="no such checkpoint"):
        pair.rank0.broadcast_from_rank0(refused)
    with pytest.raises(ServerError, match=r"OSError: .*Stale file handle"):
        pair.rank0.broadcast_from_rank0(away)
    pair.run(CREATE)
    assert received == [7] and pair.other.log == pair.own.log


def test_process_0_that_stops_early_ends_the_others(started: _Started) -> None:
    pair = started(lambda worker: worker.broadcast_from_rank0(lambda: 1))
    pair.rank0.stop()
    assert isinstance(pair.end.get(timeout=60), RankLostError)
