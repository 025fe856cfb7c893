import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine, WithdrawnError
from skyrl_tx_server.engine.executor_protocol import FailedSequence, Job, SequencesLostError
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    Done,
    DropSnapshot,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Op,
    OpResult,
    OptimStep,
    Sample,
    SampleResult,
    SamplingSettings,
    SaveSampler,
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
        executor.gate.set()
        engine.stop()


def sample(
    last_token: int = 1, *, num_samples: int = 1, max_tokens: int | None = None, weights: str | None = None
) -> Sample:
    settings = SamplingSettings(max_tokens=max_tokens)
    return Sample(
        weights=weights,
        prompt=np.array([7, last_token], np.int32),
        settings=settings,
        num_samples=num_samples,
    )


def train(model_id: str, num_data: int) -> ForwardBackward:
    tokens = np.zeros(3, np.int32)
    datum = TrainDatum(tokens=tokens, target_tokens=tokens)
    return ForwardBackward(model_id=model_id, data=(datum,) * num_data, loss_fn=LossFn.CROSS_ENTROPY)


def create(model_id: str) -> CreateModel:
    return CreateModel(model_id=model_id, lora=LoraSpec(rank=2))


def optim(model_id: str) -> OptimStep:
    return OptimStep(model_id=model_id, adam=AdamSettings())


def test_one_thread_runs_operations_and_resolves_futures():
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


def test_a_request_can_have_more_samples_than_slots():
    with running(FakeExecutor(num_slots=2)) as engine:
        result = engine.submit(replace(sample(10, num_samples=5), prompt_logprobs=True)).result(TIMEOUT_S)
    assert isinstance(result, SampleResult)
    assert [list(sequence.tokens) for sequence in result.sequences] == [[11, 12, 13, 14]] * 5
    # the prompt logprobs and the number of cache hits are those of the first sample
    assert result.prompt_logprobs is not None and result.prompt_cache_hit_tokens == 0
    stats = engine.stats()
    assert (stats["tokens_prefilled"], stats["tokens_from_prefix_cache"]) == (2 + 1 + 1, 1 + 1)


def test_the_prompt_of_a_paused_sequence_is_counted_once():
    executor = FakeExecutor(num_slots=1, gate=threading.Event())
    with running(executor) as engine:
        requests = [
            engine.submit(sample(max_tokens=40), tenant="a"),
            engine.submit(sample(max_tokens=4), tenant="b"),
        ]
        executor.gate.set()
        for request in requests:
            request.result(TIMEOUT_S)
        stats = engine.stats()
    assert any(entry.startswith("pause") for entry in executor.log)
    assert (stats["tokens_prefilled"], stats["tokens_from_prefix_cache"]) == (2 + 2, 0)


def test_training_runs_between_dispatches_of_a_long_generation():
    executor = FakeExecutor(gate=threading.Event())
    with running(executor) as engine:
        long = engine.submit(sample(max_tokens=40))
        forward = engine.submit(train("a", 3))
        executor.gate.set()
        long.result(TIMEOUT_S)
        forward.result(TIMEOUT_S)
    calls = [entry.split()[0] for entry in executor.log]
    last = max(index for index, call in enumerate(calls) if call == "forward_backward")
    during_training = calls[calls.index("decode") : last + 1]
    assert all(
        pair in (["decode", "forward_backward"], ["forward_backward", "decode"])
        for pair in map(list, pairwise(during_training))
    )
    num_decodes = during_training.count("decode")
    assert executor.dispatched_next == [False] * num_decodes + [True] * (
        len(executor.dispatched_next) - num_decodes
    ), "no dispatch starts ahead while training waits"


def test_no_dispatch_starts_ahead_if_a_waiting_sample_can_start():
    executor = FakeExecutor(num_slots=1, block=2, gate=threading.Event())
    with running(executor) as engine:
        futures = [engine.submit(sample(max_tokens=6)) for _ in range(2)]
        executor.gate.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert executor.dispatched_next == [True, True, False, True, True, True], (
        "the first sample ends in the third dispatch"
    )


def test_a_known_error_is_passed_on_and_fails_only_its_operation():
    error = NotFoundError("no model a")
    with running(FakeExecutor(errors={"optim a": error})) as engine:
        failing, good = engine.submit(optim("a")), engine.submit(optim("b"))
        assert failing.exception(TIMEOUT_S) is error
        assert good.result(TIMEOUT_S).metrics == {"grad_norm": 1.0}


def test_an_unexpected_error_becomes_a_server_error(caplog: pytest.LogCaptureFixture):
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


def test_out_of_memory_names_the_options_to_lower():
    exhausted = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with running(FakeExecutor(errors={"forward_backward a 1": exhausted})) as engine:
        error = engine.submit(train("a", 3)).exception(TIMEOUT_S)
    assert "start the server with smaller max_num_seqs" in str(error) and "allocating 9 bytes" in str(error)


def test_an_invalid_sample_fails_alone():
    with running(FakeExecutor()) as engine:
        good, bad = engine.submit(sample(max_tokens=20)), engine.submit(sample(max_tokens=63))
        assert isinstance(bad.exception(TIMEOUT_S), UserError)
        assert len(good.result(TIMEOUT_S).sequences[0].tokens) == 20


def test_a_failed_sequence_fails_only_its_request():
    executor = FakeExecutor(num_slots=2, errors={"admit s 2+1": RuntimeError("boom")})
    with running(executor) as engine:
        bad, good = engine.submit(sample(num_samples=3, weights="s")), engine.submit(sample(5))
        assert "boom" in str(bad.exception(TIMEOUT_S))
        assert list(good.result(TIMEOUT_S).sequences[0].tokens) == [6, 7, 8, 9]
        assert engine.stats()["slots_used"] == 0


@pytest.mark.parametrize(
    "entry, error", [("decode", RuntimeError("lost")), ("admit other 0+1", SequencesLostError("lost"))]
)
def test_lost_sequences_fail_only_running_samples(entry: str, error: Exception):
    executor = FakeExecutor(num_slots=2, errors={entry: error}, gate=threading.Event())
    with running(executor) as engine:
        first = engine.submit(sample(max_tokens=20))
        second = engine.submit(sample(weights="other"))
        executor.gate.set()
        assert "lost" in str(first.exception(TIMEOUT_S)) and "lost" in str(second.exception(TIMEOUT_S))
        executor.errors.clear()
        assert len(engine.submit(sample()).result(TIMEOUT_S).sequences) == 1


def test_a_lost_cache_does_not_fail_waiting_samples():
    executor = TwoPromptExecutor(errors={"admit other 0+1": SequencesLostError("lost")})
    with running(executor) as engine:
        blocker = engine.submit(create("blocks the engine until all operations are submitted"))
        failing, *waiting = [
            engine.submit(sample(last, weights="other" if last == 1 else None)) for last in (1, 2, 3)
        ]
        executor.gate.set()
        blocker.result(TIMEOUT_S)
        assert isinstance(failing.exception(TIMEOUT_S), SequencesLostError)
        assert [int(future.result(TIMEOUT_S).sequences[0].tokens[0]) for future in waiting] == [3, 4]
    assert executor.prefill_calls == [[1, 2, 3], [2, 3]]


def test_a_sample_without_a_lora_slot_waits_for_one():
    class OneAtATime(FakeExecutor):
        def prefill(self, requests):
            if self.num_running:
                raise CapacityError("no free LoRA slot")
            return super().prefill(requests)

    with running(OneAtATime()) as engine:
        futures = [engine.submit(sample(last)) for last in (1, 2, 3)]
        assert [future.result(TIMEOUT_S).sequences[0].tokens[0] for future in futures] == [2, 3, 4]


def test_a_sample_starts_when_a_preempted_sequence_is_restored():
    class Restoring(FakeExecutor):
        def prefill(self, requests):
            if self.num_preempted:
                raise CapacityError("preempted sequences are restored before new sequences start")
            self.num_preempted = 1 if requests[0].op.settings.max_tokens == 50 else 0
            return super().prefill(requests)

        def decode(self):
            self.num_preempted = 0
            return super().decode()

    ended = []
    with running(Restoring()) as engine:
        futures = [engine.submit(sample(1, max_tokens=50)), engine.submit(sample(2))]
        for name, future in zip(("long", "short"), futures, strict=True):
            future.add_done_callback(lambda _, name=name: ended.append(name))
        for future in futures:
            future.result(TIMEOUT_S)
    assert ended == ["short", "long"]


def test_a_waiting_sample_starts_after_another_is_withdrawn():
    class OneAtATime(FakeExecutor):
        def prefill(self, requests):
            if self.num_running:
                raise CapacityError("no free LoRA slot")
            return super().prefill(requests)

    with running(OneAtATime(block=2)) as engine:
        withdrawn = engine.submit(sample(1, max_tokens=50), TokenRecorder(patience=2))
        waiting = engine.submit(sample(2))
        with pytest.raises(WithdrawnError):
            withdrawn.result(TIMEOUT_S)
        assert waiting.result(TIMEOUT_S).sequences[0].tokens[0] == 3


def test_the_tokens_of_a_withdrawn_sample_are_counted():
    with running(FakeExecutor(block=2)) as engine:
        withdrawn = engine.submit(sample(1, max_tokens=50), TokenRecorder(patience=2))
        with pytest.raises(WithdrawnError):
            withdrawn.result(TIMEOUT_S)
        stats = engine.stats()
    dispatches = stats["decode_dispatches"]
    assert isinstance(dispatches, int) and stats["tokens_sampled"] == 2 * dispatches > 0


class TwoPromptExecutor(FakeExecutor):
    """Prefills two prompts in a batch.

    A prompt with the weights "poison" fails its batch. A prompt with the weights "huge" never fits.
    `withdraw` is called during the prefill.
    """

    def __init__(self, **options) -> None:
        super().__init__(num_slots=8, gate=threading.Event(), **options)
        self.prefill_calls: list[list[int]] = []
        self.withdraw: Callable[[], object] = lambda: None

    def prefill(self, requests):
        self.gate.wait()
        self.prefill_calls.append([int(request.op.prompt[-1]) for request in requests])
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


def test_a_prompt_that_fails_a_prefill_batch_fails_alone():
    executor = TwoPromptExecutor()
    with running(executor) as engine:
        blocker = engine.submit(create("blocks the engine until all operations are submitted"))
        futures = [
            engine.submit(sample(last, weights="poison" if last == 2 else None)) for last in (1, 2, 3, 4, 5)
        ]
        executor.gate.set()
        blocker.result(TIMEOUT_S)
        assert "boom" in str(futures.pop(1).exception(TIMEOUT_S))
        assert [int(future.result(TIMEOUT_S).sequences[0].tokens[0]) for future in futures] == [2, 4, 5, 6]
        assert engine.stats()["ops_pending"] == 0
    assert executor.prefill_calls == [[1, 2, 3, 4, 5], [1], [2, 3, 4, 5], [2], [3, 4, 5], [5]]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_sample_that_never_fits_fails_alone(withdrawn: bool):
    executor = TwoPromptExecutor()
    with running(executor) as engine:
        blocker = engine.submit(create("blocks the engine until all operations are submitted"))
        huge, *others = [
            engine.submit(sample(last, weights="huge" if last == 1 else None), TokenRecorder())
            for last in (1, 2, 3)
        ]
        executor.withdraw = huge.cancel if withdrawn else lambda: None
        executor.gate.set()
        blocker.result(TIMEOUT_S)
        assert [int(future.result(TIMEOUT_S).sequences[0].tokens[0]) for future in others] == [3, 4]
        assert huge.cancelled() if withdrawn else isinstance(huge.exception(TIMEOUT_S), CapacityError)
        assert engine.stats()["ops_pending"] == 0
    assert executor.prefill_calls == [[1, 2, 3], [2, 3]]


def test_a_withdrawn_sample_is_removed_completely():
    executor = TwoPromptExecutor()
    with running(executor) as engine:
        blocker = engine.submit(create("blocks the engine until all operations are submitted"))
        prefilled, kept, waiting = [
            engine.submit(sample(last, max_tokens=50 if last == 1 else None), TokenRecorder())
            for last in (1, 2, 3)
        ]
        executor.withdraw = lambda: (prefilled.cancel(), waiting.cancel())
        executor.gate.set()
        blocker.result(TIMEOUT_S)
        assert int(kept.result(TIMEOUT_S).sequences[0].tokens[0]) == 3
        assert prefilled.cancelled() and waiting.cancelled()
        assert (engine.stats()["ops_pending"], engine.stats()["slots_used"]) == (0, 0)
    assert executor.prefill_calls == [[1, 2, 3]] and executor.log.count("decode") == 2


class ChunkedExecutor(FakeExecutor):
    """Prefills a prompt with the weights "long" in three chunks."""

    def prefill(self, requests):
        (request,) = requests
        if request.op.weights == "long" and self.log.count("chunk") < 2:
            self.log.append("chunk")
            return [None]
        return super().prefill(requests)


def test_the_engine_decodes_between_two_prefill_chunks():
    executor = ChunkedExecutor(num_slots=2, gate=threading.Event())
    with running(executor) as engine:
        futures = [engine.submit(sample(max_tokens=20, weights=weights)) for weights in ("short", "long")]
        executor.gate.set()
        for future in futures:
            future.result(TIMEOUT_S)
    assert executor.log[:6] == ["admit short 0+1", "chunk", "decode", "chunk", "decode", "admit long 0+1"]
    assert executor.dispatched_next[:3] == [False, False, True], (
        "no dispatch starts ahead while a prefill chunk waits"
    )


class ReorderingExecutor(FakeExecutor):
    """Completes samples in reverse order. The logprobs of a sample are its index.

    The second sample of the weights "broken" fails. Samples of "short" end with their first token.
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


def test_results_are_in_sample_order_if_samples_end_in_any_order():
    executor = ReorderingExecutor(gate=threading.Event())
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
        first.result(TIMEOUT_S)
        engine.submit(optim("b")).result(TIMEOUT_S)
        assert engine.stats()["ops_pending"] == 0
    assert executor.log == ["create a", "optim b"]


def test_a_cancelled_waiting_sample_leaves_the_queue_at_once():
    executor = FakeExecutor(num_slots=1, gate=threading.Event())
    with running(executor) as engine:
        blocker = engine.submit(create("blocks the engine"))
        kept, *cancelled = [engine.submit(sample(weights="s"), TokenRecorder()) for _ in range(4)]
        dropped = engine.submit(DropSnapshot(weights="s"))
        for future in cancelled:
            assert future.cancel()
        stats = engine.stats()
        assert (stats["samples_waiting"], stats["ops_pending"]) == (1, 3)
        executor.gate.set()
        for future in (blocker, kept, dropped):
            future.result(TIMEOUT_S)
        assert engine.stats()["ops_pending"] == 0


def test_a_cancelled_operation_leaves_the_queue_at_once():
    executor = FakeExecutor(gate=threading.Event())
    with running(executor) as engine:
        blocker = engine.submit(create("a"))
        kept, *cancelled = [engine.submit(op) for op in (optim("a"), train("a", 1), optim("a"))]
        saved = engine.submit(SaveSampler(model_id="a", weights="s"))
        waiting = engine.submit(sample(weights="s"))
        for future in (*cancelled, saved):
            assert future.cancel()
        stats = engine.stats()
        assert (stats["steps_waiting"], stats["samples_waiting"], stats["ops_pending"]) == (2, 1, 3)
        executor.gate.set()
        for future in (blocker, kept, waiting):
            future.result(TIMEOUT_S)
        assert engine.stats()["ops_pending"] == 0
    assert [entry for entry in executor.log if entry.endswith(" a")] == ["create a", "optim a"]


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


class SignallingExecutor(FakeExecutor):
    """Sets the event `entered` when an operation begins."""

    def __init__(self) -> None:
        super().__init__(gate=threading.Event())
        self.entered = threading.Event()

    def run(self, op):
        self.entered.set()
        return super().run(op)


def test_stop_waits_for_the_running_operation():
    executor = SignallingExecutor()
    engine = Engine(executor)
    engine.start()
    future = engine.submit(create("a"))
    executor.entered.wait(TIMEOUT_S)
    threading.Timer(0.05, executor.gate.set).start()
    engine.stop()
    assert future.result(0) == Done()


class WaitingExecutor(FakeExecutor):
    """Operations of the model `waiting` first wait for the future `written`, as for another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Future[None] = Future()
        self.waits = threading.Event()  # an operation of `waiting` has begun

    def run(self, op: Op) -> Job[OpResult]:
        if getattr(op, "model_id", None) == "waiting":
            self.waits.set()
            yield self.written
            self.written.result()
        return (yield from super().run(op))


def test_other_operations_run_while_one_waits_for_a_future():
    executor = WaitingExecutor()
    with running(executor) as engine:
        waiting, later = engine.submit(optim("waiting")), engine.submit(optim("waiting"))
        executor.waits.wait(TIMEOUT_S)
        engine.submit(optim("other")).result(TIMEOUT_S)
        engine.submit(sample()).result(TIMEOUT_S)
        assert not waiting.done() and executor.log.count("optim waiting") == 0
        executor.written.set_result(None)
        waiting.result(TIMEOUT_S)
        later.result(TIMEOUT_S)
    assert executor.log[0] == "optim other" and executor.log[-2:] == ["optim waiting"] * 2


def test_an_error_of_the_awaited_future_fails_the_operation():
    executor = WaitingExecutor()
    executor.written.set_exception(UserError("the disk is full"))
    with running(executor) as engine:
        assert str(engine.submit(optim("waiting")).exception(TIMEOUT_S)) == "the disk is full"
        engine.submit(optim("other")).result(TIMEOUT_S)


def test_stop_waits_for_the_awaited_future():
    executor = WaitingExecutor()
    engine = Engine(executor)
    engine.start()
    future = engine.submit(optim("waiting"))
    executor.waits.wait(TIMEOUT_S)
    threading.Timer(0.05, executor.written.set_result, [None]).start()
    engine.stop()
    assert future.exception(0) is None


def test_an_operation_abandoned_while_running_resolves_once():
    executor, threads = SignallingExecutor(), set(threading.enumerate())
    with running(executor) as engine:
        future = engine.submit(create("a"))
        executor.entered.wait(TIMEOUT_S)
        engine.abandon("lost")
        assert str(future.exception(0)) == "lost"
    assert set(threading.enumerate()) <= threads and executor.log == ["create a"]


def test_a_bug_in_the_engine_thread_fails_all_futures():
    class BrokenWatcher(TokenRecorder):
        def is_waiting(self) -> bool:
            raise KeyError("a bug")

    failed: Future[str] = Future()
    engine = Engine(FakeExecutor(), on_failure=failed.set_result)
    futures = [engine.submit(sample(), BrokenWatcher()), engine.submit(sample())]
    assert engine.failure is None
    engine.start()
    reason = failed.result(TIMEOUT_S)
    assert reason.startswith("the engine failed (KeyError: 'a bug'); ") and engine.failure == reason
    assert [str(future.exception(0)) for future in [*futures, engine.submit(sample())]] == [reason] * 3
    engine.stop()


def test_a_lost_process_gives_its_own_message():
    class LostWatcher(TokenRecorder):
        def is_waiting(self) -> bool:
            raise ServerError("process 1 has disconnected")

    failed: Future[str] = Future()
    engine = Engine(FakeExecutor(), on_failure=failed.set_result)
    future = engine.submit(sample(), LostWatcher())
    engine.start()
    assert failed.result(TIMEOUT_S) == str(future.exception(0)) == "process 1 has disconnected"
    engine.stop()


class TokenRecorder:
    """A watcher that records its tokens and withdraws its sample after `patience` calls."""

    streams_tokens = True

    def __init__(self, patience: int = 1000) -> None:
        self.calls: list[tuple[int, list[int], list[float]]] = []
        self._patience = patience

    def tokens(self, index, tokens, logprobs) -> None:
        self.calls.append((index, list(tokens), list(logprobs)))

    def is_waiting(self) -> bool:
        return len(self.calls) < self._patience


def test_a_watcher_gets_all_tokens_once_before_the_last_dispatch():
    with running(FakeExecutor(block=2)) as engine:
        recorder = TokenRecorder()
        result = engine.submit(sample(10, num_samples=2, max_tokens=5), recorder).result(TIMEOUT_S)
        assert recorder.calls == [
            (index, ids, [-1.0, -1.0]) for ids in ([11, 12], [13, 14]) for index in (0, 1)
        ]
        assert [sequence.tokens.tolist() for sequence in result.sequences] == [[11, 12, 13, 14, 15]] * 2
        without_tokens = TokenRecorder()
        without_tokens.streams_tokens = False
        engine.submit(sample(10, max_tokens=5), without_tokens).result(TIMEOUT_S)
        assert not without_tokens.calls


@pytest.mark.parametrize(("patience", "dispatches"), [(0, 0), (1, 1 + 1)])
def test_a_sample_that_its_watcher_withdraws_releases_its_slots(patience: int, dispatches: int):
    executor = FakeExecutor(block=2)
    with running(executor) as engine:
        with pytest.raises(WithdrawnError):
            engine.submit(sample(10, max_tokens=50), TokenRecorder(patience)).result(TIMEOUT_S)
        assert executor.num_running == 0 and executor.log.count("decode") == dispatches
        engine.submit(sample(10)).result(TIMEOUT_S)


def test_the_engine_drops_the_watcher_of_a_refused_sample():
    with running(FakeExecutor()) as engine:
        watcher = TokenRecorder()
        reference = weakref.ref(watcher)
        with pytest.raises(UserError):
            engine.submit(sample(10, max_tokens=1000), watcher).result(TIMEOUT_S)
        # After this operation, the engine's thread has dropped its references to the refused sample.
        engine.submit(sample(10)).result(TIMEOUT_S)
        del watcher
        gc.collect()
        assert reference() is None
