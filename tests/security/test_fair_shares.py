"""A large request of one tenant delays small requests by a few decode dispatches only.

The tests run the real engine on a CPU. They count waits in decode dispatches, not in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    CreateModel,
    LoraSpec,
    Sample,
    SampleResult,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.executor.executor import DeviceExecutor
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

MODEL = replace(
    CONFIG,
    hidden_size=64,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=2048,
)
"""With this hidden size, the result of a token does not depend on the number of tokens that are computed with
it, so results are equal bit for bit."""
SLOTS, STEPS_PER_DISPATCH, CONTEXT, TIMEOUT_S = 4, 8, 2048, 240
FEW_DISPATCHES = 6
"""The longest wait for a small sample: the running dispatch, the dispatches before a pause, one dispatch for
the sample, and one dispatch as a margin."""


def request(
    seed: int, *, prompt_tokens: int = 40, num_samples: int = 1, max_tokens: int, weights: str | None = None
) -> Sample:
    prompt = np.random.default_rng(seed).integers(0, 256, prompt_tokens).astype(np.int32)
    settings = SamplingSettings(max_tokens=max_tokens, seed=seed, stop_at_eos=False)
    return Sample(weights=weights, prompt=prompt, settings=settings, num_samples=num_samples)


LARGE = request(1, num_samples=12, max_tokens=160)
SMALL = request(2, prompt_tokens=20, max_tokens=4)


@dataclass
class SmallRequests:
    """A watcher of a large request. It submits small requests, one after the other, on the engine's thread.

    It submits them when the engine reports tokens, so at the same decode steps in every run of the test.
    """

    engine: Engine
    tenant: str
    count: int
    op: Sample = SMALL
    after_reports: int = 4  # calls of `tokens` before the first small request
    waits: list[int] = field(default_factory=list)  # in decode dispatches
    results: list[Future[SampleResult]] = field(default_factory=list)
    streams_tokens: bool = True
    _reports: int = 0
    _waiting: bool = False

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._reports += 1
        if self._reports > self.after_reports and not self._waiting and len(self.results) < self.count:
            self._waiting = True
            dispatches_before = self._num_dispatches
            future = self.engine.submit(self.op, tenant=self.tenant)
            self.results.append(future)
            future.add_done_callback(lambda _: self._record_wait(self._num_dispatches - dispatches_before))

    def is_waiting(self) -> bool:
        return True

    def _record_wait(self, num_dispatches: int) -> None:
        self.waits.append(num_dispatches)
        self._waiting = False

    @property
    def _num_dispatches(self) -> int:
        num_dispatches = self.engine.stats()["decode_dispatches"]
        assert isinstance(num_dispatches, int)
        return num_dispatches


def start_engine(directory: Path, **settings: object) -> Engine:
    options = {
        "max_num_seqs": SLOTS,
        "decode_steps_per_dispatch": STEPS_PER_DISPATCH,
        "max_context_length": CONTEXT,
        **settings,
    }
    engine = Engine(
        DeviceExecutor(make_settings(make_model(directory / "model", MODEL), directory, **options))
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = start_engine(tmp_path_factory.mktemp("fair"))
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def large_alone(engine: Engine) -> SampleResult:
    return result(engine.submit(LARGE))


@pytest.fixture(scope="module")
def small_alone(engine: Engine) -> SampleResult:
    return result(engine.submit(SMALL))


def result(future: Future[SampleResult]) -> SampleResult:
    return future.result(TIMEOUT_S)


def assert_same(actual: SampleResult, expected: SampleResult, *, atol: float = 0.0) -> None:
    for sequence, expected_sequence in zip(actual.sequences, expected.sequences, strict=True):
        np.testing.assert_array_equal(sequence.tokens, expected_sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, expected_sequence.logprobs, atol=atol, rtol=0)


@pytest.mark.parametrize("tenant", ["neighbour", "hostile"])
def test_a_small_sample_waits_briefly_and_changes_no_result(
    engine: Engine, large_alone: SampleResult, small_alone: SampleResult, tenant: str
) -> None:
    """The small requests come from the tenant of the large request or from another tenant."""
    before = engine.stats()
    small_requests = SmallRequests(engine, tenant, 8)
    large = engine.submit(LARGE, small_requests, tenant="hostile")
    assert_same(result(large), large_alone)
    for future in small_requests.results:
        assert_same(result(future), small_alone)
    after = engine.stats()
    assert len(small_requests.waits) == 8 and max(small_requests.waits) <= FEW_DISPATCHES
    assert after["num_pauses"] != before["num_pauses"] and after["sequences_paused"] == 0
    assert after["programs"] == before["programs"], "no program is compiled for a pause"


def test_small_samples_wait_briefly_beside_many_tenants(engine: Engine, small_alone: SampleResult) -> None:
    requests = [request(100 + number, num_samples=4, max_tokens=120) for number in range(3 * SLOTS)]
    alone = [result(engine.submit(op)) for op in requests]
    small_requests = SmallRequests(engine, "neighbour", 12, after_reports=30)
    futures = [
        engine.submit(op, None if number else small_requests, tenant=f"hostile {number}")
        for number, op in enumerate(requests)
    ]
    for future, expected in zip(futures, alone, strict=True):
        assert_same(result(future), expected)
    for future in small_requests.results:
        assert_same(result(future), small_alone)
    assert small_requests.waits and max(small_requests.waits) <= FEW_DISPATCHES


def test_a_single_request_is_never_paused(engine: Engine) -> None:
    before = engine.stats()
    result(engine.submit(request(3, num_samples=SLOTS, max_tokens=160)))
    after = engine.stats()
    num_dispatches = after["decode_dispatches"] - before["decode_dispatches"]  # type: ignore[operator]
    assert after["num_pauses"] == before["num_pauses"]
    num_ahead = after["decode_dispatches_ahead"] - before["decode_dispatches_ahead"]  # type: ignore[operator]
    # The first dispatch, and dispatches after sequences have ended, are not dispatched ahead.
    assert num_ahead >= 0.8 * num_dispatches


def test_paused_sequences_free_their_pages_when_others_need_them(tmp_path: Path, engine: Engine) -> None:
    """The small cache holds two complete sequences. Tokens equal those with a large cache, and logprobs
    differ by at most 1e-4."""
    requests = [request(200 + number, num_samples=3, max_tokens=220) for number in range(6)]
    alone = [result(engine.submit(op)) for op in requests]
    small_alone = result(engine.submit(SMALL))
    small_engine = start_engine(tmp_path, cache_tokens=768, max_context_length=512)
    try:
        small_requests = SmallRequests(small_engine, "neighbour", 6, after_reports=10)
        futures = [
            small_engine.submit(op, None if number else small_requests, tenant=f"{number}")
            for number, op in enumerate(requests)
        ]
        for future, expected in zip(futures, alone, strict=True):
            assert_same(result(future), expected, atol=1e-4)
        for future in small_requests.results:
            assert_same(result(future), small_alone, atol=1e-4)
        stats = small_engine.stats()
    finally:
        small_engine.stop()
    assert small_requests.waits and max(small_requests.waits) <= 3 * FEW_DISPATCHES
    assert (
        stats["num_pauses"]
        and stats["num_preemptions"]
        and (stats["sequences_paused"], stats["sequences_preempted"], stats["slots_used"]) == (0, 0, 0)
    )
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]  # type: ignore[operator]


def test_tenants_with_more_snapshots_than_lora_slots_are_served(tmp_path: Path) -> None:
    small_engine = start_engine(tmp_path, max_loras=2)
    try:
        for number in range(5):
            small_engine.submit(CreateModel(model_id=f"m{number}", lora=LoraSpec(rank=4, seed=number)))
            small_engine.submit(SaveSampler(model_id=f"m{number}", weights=f"s{number}")).result(TIMEOUT_S)
        requests = [
            request(300 + number, num_samples=4, max_tokens=320, weights=f"s{number}") for number in range(5)
        ]
        alone = [result(small_engine.submit(op)) for op in requests]
        futures = [small_engine.submit(op, tenant=f"{number}") for number, op in enumerate(requests)]
        for future, expected in zip(futures, alone, strict=True):
            assert_same(result(future), expected)
        assert small_engine.stats()["num_pauses"]
    finally:
        small_engine.stop()


def test_long_prompts_delay_a_short_one_by_few_dispatches(engine: Engine) -> None:
    prompts = [request(400 + number, prompt_tokens=1100, max_tokens=20) for number in range(12)]
    alone = [result(engine.submit(op)) for op in prompts]
    small_requests = SmallRequests(engine, "neighbour", 4, after_reports=1)
    watched = engine.submit(request(500, max_tokens=160), small_requests, tenant="hostile")
    futures = [engine.submit(replace(op, prompt=np.roll(op.prompt, 1)), tenant="hostile") for op in prompts]
    for future in (watched, *futures, *small_requests.results):
        result(future)
    assert small_requests.waits and max(small_requests.waits) <= 4, (
        "a decode dispatch runs between two prefill chunks"
    )
    for op, expected in zip(prompts, alone, strict=True):
        assert_same(result(engine.submit(op)), expected)


def test_a_withdrawn_request_with_paused_sequences_is_removed(engine: Engine) -> None:
    class WithdrawnAfterTwoResults(SmallRequests):
        def is_waiting(self) -> bool:
            return len(self.waits) < 2

    small_requests = WithdrawnAfterTwoResults(engine, "neighbour", 3)
    future = engine.submit(LARGE, small_requests, tenant="hostile")
    assert "withdrawn" in str(future.exception(TIMEOUT_S))
    for future in small_requests.results:
        result(future)
    stats = engine.stats()
    assert (stats["sequences_paused"], stats["slots_used"], stats["samples_waiting"]) == (0, 0, 0)
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]  # type: ignore[operator]
