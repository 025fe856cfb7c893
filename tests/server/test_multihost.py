"""Tests of two server processes, simulated by two threads whose executors have no devices."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import numpy as np
import pytest

from skyrl_tx_server.distributed.multihost import (
    RESTART_HINT,
    Call,
    MultihostExecutor,
    RankLostError,
    RankZero,
    WorkerRank,
)
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
    """Process 0 with its multihost executor, and the fake executors of both processes."""

    rank0: RankZero
    executor: MultihostExecutor
    fake0: FakeExecutor
    fake1: FakeExecutor
    lost: SimpleQueue[str]  # what process 0 passed to `on_lost`: why the server cannot continue
    end: SimpleQueue[Exception | None]  # the error that ended process 1, or None

    def run(self, op: Op) -> object:
        job = self.executor.run(op)
        while True:
            try:
                next(job)
            except StopIteration as finished:
                return finished.value


@dataclass(kw_only=True)
class _PairStarter:
    """Starts a new pair in each call. Process 1 calls `on_start` before it follows process 0."""

    pairs: list[Pair] = field(default_factory=list)

    def __call__(self, on_start: Callable[[WorkerRank], object] | None = None) -> Pair:
        ours, theirs = channels()
        lost, end = SimpleQueue[str](), SimpleQueue[Exception | None]()
        fake0, fake1, worker = FakeExecutor(), FakeExecutor(), WorkerRank(theirs)

        def start() -> FakeExecutor:
            if on_start is not None:
                on_start(worker)
            return fake1

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
            rank0=rank0,
            executor=MultihostExecutor(fake0, rank0),
            fake0=fake0,
            fake1=fake1,
            lost=lost,
            end=end,
        )
        self.pairs.append(pair)
        return pair


@pytest.fixture
def start_pair() -> Iterator[_PairStarter]:
    starter = _PairStarter()
    yield starter
    for pair in starter.pairs:
        pair.rank0.stop()


def forward_backward(*lengths: int) -> ForwardBackward:
    data = tuple(
        TrainDatum(tokens=np.zeros(length, np.int32), target_tokens=np.zeros(length, np.int32))
        for length in lengths
    )
    return ForwardBackward(model_id="m", data=data, loss_fn=LossFn.CROSS_ENTROPY)


def test_every_process_makes_the_same_calls_in_the_same_order(start_pair: _PairStarter) -> None:
    pair = start_pair()
    engine = Engine(pair.executor)
    engine.start()
    futures = [engine.submit(op) for op in (CREATE, SAMPLE, forward_backward(3, 4, 5), SAMPLE)]
    results = [future.result(60) for future in futures]
    engine.stop()
    pair.rank0.stop()
    assert pair.end.get(timeout=60) is None
    assert len(pair.fake0.log) >= 8 and pair.fake1.log == pair.fake0.log
    assert len(results[2].logprobs) == 3 and len(results[3].sequences) == 2  # type: ignore[union-attr]


class SubmittingWatcher:
    """A watcher that submits a sample of another tenant when it receives its first tokens."""

    streams_tokens = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.submitted: Future[OpResult] | None = None

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if self.submitted is None:
            self.submitted = self._engine.submit(SAMPLE, tenant="b")

    def is_waiting(self) -> bool:
        return True


def test_sequences_are_paused_on_every_process(start_pair: _PairStarter) -> None:
    pair = start_pair()
    engine = Engine(pair.executor)
    engine.start()
    watcher = SubmittingWatcher(engine)
    large = replace(SAMPLE, settings=SamplingSettings(max_tokens=40), num_samples=8)
    result = engine.submit(large, watcher, tenant="a").result(60)
    assert watcher.submitted is not None
    watcher.submitted.result(60)
    engine.stop()
    pair.rank0.stop()
    assert pair.end.get(timeout=60) is None
    assert any(entry.startswith("pause") for entry in pair.fake0.log) and pair.fake1.log == pair.fake0.log
    assert isinstance(result, SampleResult)
    assert [list(sequence.tokens) for sequence in result.sequences] == [list(range(7, 47))] * 8


def test_a_user_error_of_all_processes_fails_only_its_operation(start_pair: _PairStarter) -> None:
    pair = start_pair()
    pair.run(CREATE)
    for executor in (pair.fake0, pair.fake1):
        executor.errors["create n"] = UserError("not this one")
    with pytest.raises(UserError, match="not this one"):
        pair.run(CreateModel(model_id="n", lora=LoraSpec(rank=4)))
    assert len(pair.run(forward_backward(3)).logprobs) == 1  # type: ignore[attr-defined]
    assert pair.lost.empty()


@pytest.mark.parametrize(
    ("error0", "error1", "reason"),
    [
        (None, RuntimeError("out of memory\nand so on"), "process 1 failed: RuntimeError: out of memory"),
        (RuntimeError("out of memory"), None, "process 0: RuntimeError: out of memory"),
        (
            None,
            UserError("no"),
            "the call `run` ended with UserError on process 1, but with a result on process 0: "
            f"{RESTART_HINT}",
        ),
        (
            UserError("no"),
            None,
            "the call `run` ended with a result on process 1, but with UserError on process 0: "
            f"{RESTART_HINT}",
        ),
        (
            SequencesLostError("gone"),
            SequencesLostError("gone"),
            "process 1 failed: SequencesLostError: gone",
        ),
    ],
)
def test_a_fatal_error_or_different_outcomes_stop_the_server(
    start_pair: _PairStarter,
    error0: Exception | None,
    error1: Exception | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # After its own failure, process 0 waits LAST_MESSAGE_S for an error message of process 1.
    both_fail = isinstance(error1, SequencesLostError)
    monkeypatch.setattr("skyrl_tx_server.distributed.multihost.LAST_MESSAGE_S", 60 if both_fail else 0.2)
    pair = start_pair()
    for executor, error in ((pair.fake0, error0), (pair.fake1, error1)):
        if error is not None:
            executor.errors["create m"] = error
    with pytest.raises(RankLostError, match=reason):
        pair.run(CREATE)
    assert pair.lost.get(timeout=60) == reason
    assert isinstance(
        pair.end.get(timeout=60), type(error1) if reason.startswith("process 1 failed") else RankLostError
    )


def test_a_lost_process_fails_waiting_operations_at_once() -> None:
    ours, theirs = channels()
    # The devices of process 0 do not return until the gate opens.
    lost, fake0 = SimpleQueue[str](), FakeExecutor(gate=threading.Event())
    rank0 = RankZero({1: ours}, lost.put)
    executor = MultihostExecutor(fake0, rank0)
    engine = Engine(executor)
    engine.start()
    running, queued = engine.submit(CREATE), engine.submit(SAMPLE)
    theirs.recv_bytes()  # the operation has started
    theirs.close()
    reason = lost.get(timeout=60)
    hint = "start all processes again; saved checkpoints are in checkpoints_dir"
    assert reason == f"process 1 has disconnected: {hint}"
    engine.abandon(reason)
    for future in (running, queued):
        with pytest.raises(ServerError, match=reason):
            future.result(60)
    with pytest.raises(RankLostError, match=reason):
        executor.sampler.decode()
    executor.sampler.release(1)  # raises no RankLostError, because nothing is left to release
    assert fake0.gate is not None
    fake0.gate.set()
    engine.stop()
    rank0.stop()


def test_the_loss_of_process_0_is_detected_during_a_call() -> None:
    ours, theirs = channels()
    # The devices of process 1 do not return until the gate opens.
    lost, fake1 = SimpleQueue[str](), FakeExecutor(gate=threading.Event())
    worker = WorkerRank(theirs, lost.put)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(worker.follow, lambda: fake1)
        ours.send_bytes(pickle.dumps(Call(method="run", args=(0, CREATE))))
        ours.close()
        assert lost.get(timeout=60) == "process 0 has disconnected"
        assert not following.done() and fake1.gate is not None
        fake1.gate.set()
        assert isinstance(following.exception(60), RankLostError | OSError)


def test_every_process_gets_the_value_of_process_0(start_pair: _PairStarter) -> None:
    received = []

    def missing() -> int:
        raise UserError("no such checkpoint")

    def stale() -> int:
        raise OSError(116, "Stale file handle")

    def receive(worker: WorkerRank) -> None:
        received.append(worker.broadcast_from_rank0(lambda: 1))
        with pytest.raises(UserError, match="no such checkpoint"):
            worker.broadcast_from_rank0(lambda: 2)
        # An OSError of process 0 arrives as a ServerError, which fails only its operation.
        with pytest.raises(ServerError, match="Stale file handle"):
            worker.broadcast_from_rank0(lambda: 3)

    pair = start_pair(receive)
    assert pair.rank0.broadcast_from_rank0(lambda: 7) == 7
    with pytest.raises(UserError, match="no such checkpoint"):
        pair.rank0.broadcast_from_rank0(missing)
    with pytest.raises(ServerError, match=r"OSError: .*Stale file handle"):
        pair.rank0.broadcast_from_rank0(stale)
    pair.run(CREATE)
    assert received == [7] and pair.fake1.log == pair.fake0.log


def test_an_early_stop_of_process_0_ends_the_other_processes(start_pair: _PairStarter) -> None:
    pair = start_pair(lambda worker: worker.broadcast_from_rank0(lambda: 1))
    pair.rank0.stop()
    assert isinstance(pair.end.get(timeout=60), RankLostError)


def test_process_0_waits_until_the_other_processes_have_exited() -> None:
    ours, theirs = channels()
    lost = SimpleQueue[str]()
    rank0 = RankZero({1: ours}, lost.put)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(rank0.wait_for_exit)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        theirs.close()
        waiting.result(60)
    assert lost.empty()
