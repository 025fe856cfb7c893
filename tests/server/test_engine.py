import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine, WithdrawnError
from skyrl_tx_server.engine.executor_protocol import FailedSequence, SequencesLostError
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    Done,
    ForwardBackward,
    LoraSpec,
    LossFn,
    OptimStep,
    Sample,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.errors import CapacityError, NotFoundError, ServerError, UserError
from tests.fakes.executor import FakeExecutor

TIMEOUT_S = 60


@contextmanager
def running(executor: FakeExecutor) -> Iterator[Engine]:
    engine = Engine(executor)
    engine.start()
    try:
        yield engine
    finally:
        if executor.gate is not None:
            executor.gate.set()
        engine.stop()


def sample(
    last: int = 1, *, num_samples: int = 1, max_tokens: int | None = None, weights: str | None = None
) -> Sample:
    settings = SamplingSettings(max_tokens=max_tokens)
    return Sample(
        weights=weights, prompt=np.array([7, last], np.int32), settings=settings, num_samples=num_samples
    )


def train(model_id: str, num_data: int) -> ForwardBackward:
    tokens = np.zeros(3, np.int32)
    datum = TrainDatum(tokens=tokens, target_tokens=tokens)
    return ForwardBackward(model_id=model_id, data=(datum,) * num_data, loss_fn=LossFn.CROSS_ENTROPY)


def create(model_id: str) -> CreateModel:
    return CreateModel(model_id=model_id, lora=LoraSpec(rank=2))


def optim(model_id: str) -> OptimStep:
    return OptimStep(model_id=model_id, adam=AdamSettings())


def test_one_thread_does_the_work_and_resolves_the_futures():
    executor = FakeExecutor()
    with running(executor) as engine:
        futures = [engine.submit(create("a")), engine.submit(train("a", 2)), engine.submit(optim("a"))]
        results = [future.result(TIMEOUT_S) for future in futures]
        engine.submit(replace(train("b", 1), forward_only=True)).result(TIMEOUT_S)
        stats = engine.stats()
    assert results[0] == Done()
    assert results[1].metrics == {"loss:sum": 6.0}
    assert (stats["tokens_trained"], stats["tokens_forward"], stats["ops_finished"], stats["ops_failed"]) == (
        6,
        3,
        4,
        0,
    )
    assert executor.log.pop() == "forward_backward b 0"
    assert executor.log == ["create a", "forward_backward a 0", "forward_backward a 1", "optim a"]
    assert len(executor.threads) == 1 and threading.get_ident() not in executor.threads


def test_samples_of_a_request_return_in_order_with_few_slots():
    with running(FakeExecutor(num_slots=2)) as engine:
        result = engine.submit(replace(sample(10, num_samples=5), prompt_logprobs=True)).result(TIMEOUT_S)
    assert isinstance(result, SampleResult)
    assert [list(sequence.tokens) for sequence in result.sequences] == [[11, 12, 13, 14]] * 5
    # The values are the same as for the first sample.
    assert result.prompt_logprobs is not None and result.prompt_cache_hit_tokens == 0
    stats = engine.stats()
    assert (stats["tokens_prefilled"], stats["tokens_from_prefix_cache"]) == (2 + 1 + 1, 1 + 1)


def test_training_runs_between_dispatches_of_a_long_generation():
    executor = FakeExecutor(gate=threading.Event())
    with running(executor) as engine:
        long = engine.submit(sample(max_tokens=40))
        forward = engine.submit(train("a", 3))
        executor.gate.set()
        long.result(TIMEOUT_S), forward.result(TIMEOUT_S)
    turns = [entry.split()[0] for entry in executor.log]
    last = max(at for at, turn in enumerate(turns) if turn == "forward_backward")
    between = turns[turns.index("decode") : last + 1]
    assert all(
        pair in (["decode", "forward_backward"], ["forward_backward", "decode"])
        for pair in map(list, pairwise(between))
    )
    beside = between.count("decode")
    assert executor.dispatched_next == [False] * beside + [True] * (len(executor.dispatched_next) - beside), (
        "the next block waits for who is next"
    )


def test_a_dispatch_follows_unless_a_waiting_sample_gets_a_slot():
    executor = FakeExecutor(num_slots=1, block=2, gate=threading.Event())
    with running(executor) as engine:
        futures = [engine.submit(sample(max_tokens=6)) for _ in range(2)]
        executor.gate.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert executor.dispatched_next == [True, True, False, True, True, True], (
        "the third block ended the first sample"
    )


def test_an_expected_error_reaches_only_its_caller_unchanged():
    error = NotFoundError("no model a")
    with running(FakeExecutor(errors={"optim a": error})) as engine:
        failing, good = engine.submit(optim("a")), engine.submit(optim("b"))
        assert failing.exception(TIMEOUT_S) is error
        assert good.result(TIMEOUT_S).metrics == {"grad_norm": 1.0}


def test_an_unexpected_error_becomes_a_server_error(
    caplog: pytest.LogCaptureFixture,
):
    with running(FakeExecutor(errors={"forward_backward a 1": RuntimeError("out of memory")})) as engine:
        error = engine.submit(train("a", 3)).exception(TIMEOUT_S)
        after = engine.submit(optim("a")).result(TIMEOUT_S)
        assert (engine.stats()["ops_finished"], engine.stats()["ops_failed"]) == (1, 1)
    assert (
        type(error) is ServerError
        and str(error) == "ForwardBackward failed in the engine: RuntimeError: out of memory"
    )
    assert after.metrics == {"grad_norm": 1.0}
    assert "Traceback" in caplog.text


def test_out_of_memory_says_what_to_lower(caplog: pytest.LogCaptureFixture):
    exhausted = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with running(FakeExecutor(errors={"forward_backward a 1": exhausted})) as engine:
        error = engine.submit(train("a", 3)).exception(TIMEOUT_S)
    assert "start the server with smaller max_num_seqs" in str(error) and "allocating 9 bytes" in str(error)


def test_a_sample_that_cannot_be_honoured_fails_alone():
    with running(FakeExecutor()) as engine:
        good, bad = engine.submit(sample(max_tokens=20)), engine.submit(sample(max_tokens=63))
        assert isinstance(bad.exception(TIMEOUT_S), UserError)
        assert len(good.result(TIMEOUT_S).sequences[0].tokens) == 20


def test_a_failed_sequence_fails_its_request_only():
    executor = FakeExecutor(num_slots=2, errors={"admit s 2+1": RuntimeError("boom")})
    with running(executor) as engine:
        bad, good = engine.submit(sample(num_samples=3, weights="s")), engine.submit(sample(5))
        assert "boom" in str(bad.exception(TIMEOUT_S))
        assert list(good.result(TIMEOUT_S).sequences[0].tokens) == [6, 7, 8, 9]
        assert engine.stats()["slots_used"] == 0


@pytest.mark.parametrize(
    "entry, error", [("decode", RuntimeError("lost")), ("admit other 0+1", SequencesLostError("lost"))]
)
def test_a_lost_cache_fails_running_samples_only(entry: str, error: Exception):
    executor = FakeExecutor(num_slots=2, errors={entry: error}, gate=threading.Event())
    with running(executor) as engine:
        first = engine.submit(sample(max_tokens=20))
        second = engine.submit(sample(weights="other"))
        executor.gate.set()
        assert "lost" in str(first.exception(TIMEOUT_S)) and "lost" in str(second.exception(TIMEOUT_S))
        executor.errors.clear()
        assert len(engine.submit(sample()).result(TIMEOUT_S).sequences) == 1


def test_a_sample_without_room_waits_for_a_sequence_to_end():
    class OneAtATime(FakeExecutor):
        def prefill(self, requests):
            if self.num_running:
                raise CapacityError("bank is full")
            return super().prefill(requests)

    with running(OneAtATime()) as engine:
        futures = [engine.submit(sample(last)) for last in (1, 2, 3)]
        assert [future.result(TIMEOUT_S).sequences[0].tokens[0] for future in futures] == [2, 3, 4]


def test_a_sample_starts_after_a_withdrawn_one_makes_room():
    class OneAtATime(FakeExecutor):
        def prefill(self, requests):
            if self.num_running:
                raise CapacityError("bank is full")
            return super().prefill(requests)

    with running(OneAtATime(block=2)) as engine:
        forsaken = engine.submit(sample(1, max_tokens=50), Notes(patience=2))
        waiting = engine.submit(sample(2))
        with pytest.raises(WithdrawnError):
            forsaken.result(TIMEOUT_S)
        assert waiting.result(TIMEOUT_S).sequences[0].tokens[0] == 3


class Together(FakeExecutor):
    """Computes two prompts at once.

    A prompt with the weights "poison" fails the batch, and one with "huge" never fits. `withdraw` is called
    during the computation.
    """

    def __init__(self, **options) -> None:
        super().__init__(num_slots=8, gate=threading.Event(), **options)
        self.offered: list[list[int]] = []
        self.withdraw: Callable[[], object] = lambda: None

    def prefill(self, requests):
        self.gate.wait()
        self.offered.append([int(request.op.prompt[-1]) for request in requests])
        if requests[0].op.weights == "huge":
            self.withdraw()
            raise CapacityError("no room")
        if any(request.op.weights == "poison" for request in requests):
            raise RuntimeError("boom")
        admissions = [
            self.admit_one(request.request_id, request.op, first=request.first, count=request.count)
            for request in requests[:2]
        ]
        self.withdraw()
        return admissions


def test_prompts_are_offered_together_and_a_bad_one_fails_alone():
    executor = Together()
    with running(executor) as engine:
        held = engine.submit(create("holds the thread until all have been submitted"))
        futures = [
            engine.submit(sample(last, weights="poison" if last == 2 else None)) for last in (1, 2, 3, 4, 5)
        ]
        executor.gate.set()
        held.result(TIMEOUT_S)
        assert "boom" in str(futures.pop(1).exception(TIMEOUT_S))
        assert [int(future.result(TIMEOUT_S).sequences[0].tokens[0]) for future in futures] == [2, 4, 5, 6]
        assert engine.stats()["ops_pending"] == 0
    assert executor.offered == [[1, 2, 3, 4, 5], [1], [2, 3, 4, 5], [2], [3, 4, 5], [5]]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_sample_that_never_fits_fails_alone(withdrawn: bool):
    executor = Together()
    with running(executor) as engine:
        held = engine.submit(create("holds the thread until all have been submitted"))
        huge, *others = [
            engine.submit(sample(last, weights="huge" if last == 1 else None), Notes()) for last in (1, 2, 3)
        ]
        executor.withdraw = huge.cancel if withdrawn else lambda: None
        executor.gate.set()
        held.result(TIMEOUT_S)
        assert [int(future.result(TIMEOUT_S).sequences[0].tokens[0]) for future in others] == [3, 4]
        assert huge.cancelled() if withdrawn else isinstance(huge.exception(TIMEOUT_S), CapacityError)
        assert engine.stats()["ops_pending"] == 0
    assert executor.offered == [[1, 2, 3], [2, 3]]


def test_a_withdrawn_sample_is_removed_completely():
    executor = Together()
    with running(executor) as engine:
        held = engine.submit(create("holds the thread until all have been submitted"))
        computed, kept, waiting = [
            engine.submit(sample(last, max_tokens=50 if last == 1 else None), Notes()) for last in (1, 2, 3)
        ]
        executor.withdraw = lambda: (computed.cancel(), waiting.cancel())
        executor.gate.set()
        held.result(TIMEOUT_S)
        assert int(kept.result(TIMEOUT_S).sequences[0].tokens[0]) == 3
        assert computed.cancelled() and waiting.cancelled()
        assert (engine.stats()["ops_pending"], engine.stats()["slots_used"]) == (0, 0)
    assert executor.offered == [[1, 2, 3]] and executor.log.count("decode") == 2


class Pieces(FakeExecutor):
    """Computes a long prompt in three prefill chunks."""

    def prefill(self, requests):
        (request,) = requests
        if request.op.weights == "long" and self.log.count("piece") < 2:
            self.log.append("piece")
            return [None]
        return super().prefill(requests)


def test_the_engine_decodes_between_two_prefill_chunks():
    executor = Pieces(num_slots=2, gate=threading.Event())
    with running(executor) as engine:
        futures = [engine.submit(sample(max_tokens=20, weights=weights)) for weights in ("short", "long")]
        executor.gate.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert executor.log[:6] == ["admit short 0+1", "piece", "decode", "piece", "decode", "admit long 0+1"]
    assert executor.dispatched_next[:3] == [False, False, True], "the next piece has its turn first"


class Doctored(FakeExecutor):
    """Samples end in reverse order, and their logprobs are their indices.

    The second sample of the weights "broken" fails, and one of "short" ends with its first token.
    """

    def admit_one(self, request_id, op, *, first, count):
        admission = super().admit_one(request_id, op, first=first, count=count)
        return (
            replace(admission, finished=self.poll(dispatch_next=False))
            if op.weights == "short"
            else admission
        )

    def poll(self, *, dispatch_next):
        broken = {request_id for (request_id, _), (op, _) in self.active.items() if op.weights == "broken"}
        return [
            FailedSequence(request_id=row.request_id, error=RuntimeError("boom"))
            if row.request_id in broken and row.index == 1
            else replace(
                row,
                sequence=replace(
                    row.sequence, logprobs=np.full(len(row.sequence.tokens), row.index, np.float32)
                ),
            )
            for row in reversed(super().poll(dispatch_next=dispatch_next))
        ]


def test_results_keep_the_order_of_samples_that_end_in_any_order():
    executor = Doctored(gate=threading.Event())
    with running(executor) as engine:
        good, bad = (
            engine.submit(sample(num_samples=2)),
            engine.submit(sample(num_samples=2, weights="broken")),
        )
        executor.gate.set()
        assert [sequence.logprobs[0] for sequence in good.result(TIMEOUT_S).sequences] == [0, 1]
        assert "boom" in str(bad.exception(TIMEOUT_S))
        short = engine.submit(sample(num_samples=2, max_tokens=1, weights="short")).result(TIMEOUT_S)
        assert [sequence.tokens.tolist() for sequence in short.sequences] == [[2], [2]]
        assert engine.stats()["ops_failed"] == 1


def test_a_withdrawn_operation_never_runs():
    executor = FakeExecutor(gate=threading.Event())
    with running(executor) as engine:
        first = engine.submit(create("a"))
        withdrawn = engine.submit(create("b"))
        withdrawn_sample = engine.submit(sample())
        assert withdrawn.cancel() and withdrawn_sample.cancel()
        executor.gate.set()
        first.result(TIMEOUT_S), engine.submit(optim("b")).result(TIMEOUT_S)
        assert engine.stats()["ops_pending"] == 0
    assert executor.log == ["create a", "optim b"]


def test_stop_fails_pending_operations_with_a_clear_error():
    executor = FakeExecutor()
    engine = Engine(executor)
    pending = [engine.submit(create("a")), engine.submit(sample())]
    engine.submit(create("withdrawn")).cancel()
    engine.stop()
    engine.stop()
    for future in [*pending, engine.submit(create("b"))]:
        error = future.exception(TIMEOUT_S)
        assert isinstance(error, ServerError) and "stopping" in str(error)
    assert executor.log == []


class Entered(FakeExecutor):
    """Sets `entered` when its first operation begins."""

    def __init__(self) -> None:
        super().__init__(gate=threading.Event())
        self.entered = threading.Event()

    def run(self, op):
        self.entered.set()
        return super().run(op)


def test_stop_waits_for_the_running_operation():
    executor = Entered()
    engine = Engine(executor)
    engine.start()
    future = engine.submit(create("a"))
    executor.entered.wait(TIMEOUT_S)
    threading.Timer(0.05, executor.gate.set).start()
    engine.stop()
    assert future.result(0) == Done()


def test_an_operation_abandoned_while_it_runs_resolves_once():
    executor, threads = Entered(), set(threading.enumerate())
    with running(executor) as engine:
        future = engine.submit(create("a"))
        executor.entered.wait(TIMEOUT_S)
        engine.abandon("lost")
        assert str(future.exception(0)) == "lost"
    assert set(threading.enumerate()) <= threads and executor.log == ["create a"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_engine_thread_fails_all_futures():
    class Broken(Notes):
        def is_waiting(self) -> bool:
            raise KeyError("a bug")

    with running(FakeExecutor()) as engine:
        futures = [engine.submit(sample(), Broken()), engine.submit(sample())]
        assert all("stopping" in str(future.exception(TIMEOUT_S)) for future in futures)


class Notes:
    """A watcher that records its reports and is no longer wanted after `patience` of them."""

    streams_tokens = True

    def __init__(self, patience: int = 1000) -> None:
        self.told: list[tuple[int, list[int], list[float]]] = []
        self._patience = patience

    def tokens(self, index, tokens, logprobs) -> None:
        self.told.append((index, list(tokens), list(logprobs)))

    def is_waiting(self) -> bool:
        return len(self.told) < self._patience


def test_a_watcher_gets_every_token_once_except_the_last_ones():
    with running(FakeExecutor(block=2)) as engine:
        notes = Notes()
        result = engine.submit(sample(10, num_samples=2, max_tokens=5), notes).result(TIMEOUT_S)
        assert notes.told == [(index, ids, [-1.0, -1.0]) for ids in ([11, 12], [13, 14]) for index in (0, 1)]
        assert [sequence.tokens.tolist() for sequence in result.sequences] == [[11, 12, 13, 14, 15]] * 2
        indifferent = Notes()
        indifferent.streams_tokens = False
        engine.submit(sample(10, max_tokens=5), indifferent).result(TIMEOUT_S)
        assert not indifferent.told


@pytest.mark.parametrize(("patience", "dispatches"), [(0, 0), (1, 1 + 1)])
def test_a_sample_that_nobody_awaits_releases_its_slots(patience: int, dispatches: int):
    executor = FakeExecutor(block=2)
    with running(executor) as engine:
        with pytest.raises(WithdrawnError):
            engine.submit(sample(10, max_tokens=50), Notes(patience)).result(TIMEOUT_S)
        assert executor.num_running == 0 and executor.log.count("decode") == dispatches
        engine.submit(sample(10)).result(TIMEOUT_S)


def test_a_sample_refused_before_it_starts_leaves_no_watcher():
    with running(FakeExecutor()) as engine:
        watcher = Notes()
        reference = weakref.ref(watcher)
        with pytest.raises(UserError):
            engine.submit(sample(10, max_tokens=1000), watcher).result(TIMEOUT_S)
        engine.submit(sample(10)).result(TIMEOUT_S)  # the engine's thread drops its references
        del watcher
        gc.collect()
        assert reference() is None
