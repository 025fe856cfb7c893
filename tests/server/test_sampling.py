"""Tests of sampling through the engine on a tiny random model: tokens, logprobs and the end of sequences."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.executor_protocol import FinishedSequence
from skyrl_tx_server.engine.operations import (
    NO_LOGPROB,
    AdamSettings,
    CreateModel,
    CsrMatrix,
    ForwardBackward,
    LoraSpec,
    LossFn,
    OptimStep,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    SaveSampler,
    StopReason,
    TrainDatum,
)
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.engine.stop_strings import find_stop
from skyrl_tx_server.errors import ConfigError, UserError
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.files.base_model import check_tokenizer
from skyrl_tx_server.model.shapes import CPU_PREFILL
from skyrl_tx_server.sampling.token_sampling import BatchSettings, sample_tokens
from tests.fakes.present import present
from tests.fakes.tiny_model import CONFIG, byte_tokenizer, make_model, make_settings

TIMEOUT_S = 900  # on a busy machine, XLA compiles for minutes
MODELS = ("first", "second")
CONTEXT = CONFIG.max_position_embeddings


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> DeviceExecutor:
    directory = tmp_path_factory.mktemp("sampling")
    return DeviceExecutor(make_settings(make_model(directory / "model"), directory / "checkpoints"))


@pytest.fixture(scope="module")
def engine(executor: DeviceExecutor) -> Iterator[Engine]:
    """Yield an engine with two trained models. Each has a snapshot with the name of the model."""
    engine = Engine(executor)
    engine.start()
    for seed, name in enumerate(MODELS):
        run(engine, CreateModel(model_id=name, lora=LoraSpec(rank=4, seed=seed)))
        for _ in range(2):
            run(
                engine,
                ForwardBackward(
                    model_id=name, data=(datum_of(tokens(40, seed)),), loss_fn=LossFn.CROSS_ENTROPY
                ),
            )
            run(engine, OptimStep(model_id=name, adam=AdamSettings(learning_rate=1e-2)))
        run(engine, SaveSampler(model_id=name, weights=name))
    yield engine
    engine.stop()


def run(engine: Engine, op):
    return engine.submit(op).result(TIMEOUT_S)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def datum_of(sequence: np.ndarray) -> TrainDatum:
    return TrainDatum(tokens=sequence[:-1].astype(np.int32), target_tokens=sequence[1:].astype(np.int32))


def request(prompt: np.ndarray, *, weights: str | None = "first", **options) -> Sample:
    """Return a request. Options are fields of `Sample` or of `SamplingSettings`."""
    sample_fields = {name: options.pop(name) for name in list(options) if name in Sample.__dataclass_fields__}
    settings = {"max_tokens": 12, "seed": 0, "stop_at_eos": False} | options
    return Sample(weights=weights, prompt=prompt, settings=SamplingSettings(**settings), **sample_fields)


def sample(engine: Engine, prompt: np.ndarray, **options) -> SampledSequence:
    return run(engine, request(prompt, **options)).sequences[0]


def forward_logprobs(
    engine: Engine, sequences: list[np.ndarray], model_id: str = "first"
) -> list[np.ndarray]:
    """Return the logprob of every token except the first, computed by a forward pass of training."""
    data = tuple(datum_of(sequence) for sequence in sequences)
    return list(
        run(
            engine,
            ForwardBackward(model_id=model_id, data=data, loss_fn=LossFn.CROSS_ENTROPY, forward_only=True),
        ).logprobs
    )


def test_logprobs_of_mixed_lengths_equal_the_forward_pass(engine: Engine):
    """The logprobs differ by at most 1e-4. The lengths cross segment and dispatch boundaries."""
    rng = np.random.default_rng(1)
    histories = [
        tokens(int(length), seed=row)
        for row, length in enumerate(np.r_[rng.integers(1, 300, 28), 250, 255, 256, 257])
    ]
    sampled: list[list[tuple[int, np.ndarray]]] = [[] for _ in histories]
    for turn in range(3):
        futures = [
            engine.submit(
                request(
                    history,
                    max_tokens=int(rng.integers(1, 60)),
                    seed=turn,
                    temperature=[1.0, 0.7, 0.0][row % 3],
                )
            )
            for row, history in enumerate(histories)
        ]
        for row, future in enumerate(futures):
            sequence = future.result(TIMEOUT_S).sequences[0]
            sampled[row].append((len(histories[row]), sequence.logprobs))
            observation = tokens(int(rng.integers(1, 20)), seed=100 * turn + row)
            histories[row] = np.concatenate([histories[row], sequence.tokens, observation])
    max_difference = 0.0
    for logprobs, turns in zip(forward_logprobs(engine, histories), sampled, strict=True):
        for start, sampled_logprobs in turns:
            max_difference = max(
                max_difference,
                float(
                    np.abs(logprobs[start - 1 : start - 1 + len(sampled_logprobs)] - sampled_logprobs).max()
                ),
            )
    assert max_difference <= 1e-4


def test_prompt_logprobs_equal_the_forward_pass(engine: Engine):
    prompts = [tokens(length, seed=length) for length in (1, 2, 100, 300)]
    futures = [engine.submit(request(prompt, max_tokens=1, prompt_logprobs=True)) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        result = future.result(TIMEOUT_S)
        logprobs = present(result.prompt_logprobs)
        assert np.isnan(logprobs[0]) and len(result.sequences[0].tokens) == 1
        if len(prompt) > 1:
            np.testing.assert_allclose(logprobs[1:], forward_logprobs(engine, [prompt])[0], atol=1e-4)
        assert result.prompt_cache_hit_tokens == 0


def test_a_conversation_prefills_only_its_new_tokens(engine: Engine):
    """Other requests between the turns change neither the cached pages nor the logprobs."""
    history = tokens(300, seed=50)
    sampled, hits = [], []
    for turn in range(3):
        result = run(engine, request(history, max_tokens=20, seed=turn))
        sequence = result.sequences[0]
        hits.append(result.prompt_cache_hit_tokens)
        sampled.append((len(history), sequence.logprobs))
        history = np.concatenate([history, sequence.tokens, tokens(30, seed=60 + turn)])
        for number in range(3):  # sequences in other slots must not change the cached pages
            run(engine, request(tokens(40, seed=70 + number), weights="second", max_tokens=30))
    assert hits == [0, 300 + 19, 300 + 20 + 30 + 19]
    (logprobs,) = forward_logprobs(engine, [history])
    for start, sampled_logprobs in sampled:
        np.testing.assert_allclose(
            sampled_logprobs, logprobs[start - 1 : start - 1 + len(sampled_logprobs)], atol=1e-4
        )


def test_a_common_prefix_is_computed_once_per_snapshot(engine: Engine):
    """Requests with an equal prompt or a common system prompt use cached pages. Requests for another snapshot
    or for prompt logprobs do not."""
    system = tokens(400, seed=80)
    prompts = [
        system,
        system,
        np.concatenate([system, tokens(50, seed=81)]),
        np.concatenate([system[:350], tokens(9, seed=82)]),
    ]
    futures = [engine.submit(request(prompt)) for prompt in prompts]
    results = [future.result(TIMEOUT_S) for future in futures]
    assert [result.prompt_cache_hit_tokens for result in results] == [0, 399, 400, 350]
    for prompt, result in zip(prompts, results, strict=True):
        whole = np.concatenate([prompt, result.sequences[0].tokens])
        np.testing.assert_allclose(
            forward_logprobs(engine, [whole])[0][len(prompt) - 1 :], result.sequences[0].logprobs, atol=1e-4
        )
    assert run(engine, request(system, weights="second")).prompt_cache_hit_tokens == 0
    assert run(engine, request(system, prompt_logprobs=True)).prompt_cache_hit_tokens == 0


@pytest.mark.usefixtures("engine")
def test_prompts_with_a_common_prefix_wait_for_the_first(executor: DeviceExecutor):
    """Prompts without a common prefix share a batch. The engine thread is idle during the test."""
    prefix, others = tokens(200, seed=9000), [tokens(100, seed=9001 + number) for number in range(3)]
    with_prefix = [np.concatenate([prefix, other]) for other in others[:2]]
    requests = [
        PrefillRequest(request_id=-number, op=request(prompt), first=0, count=1)
        for number, prompt in enumerate([*others, *with_prefix], start=1)
    ]
    try:
        for batch, hits in ((requests[:2], [0, 0]), (requests[2:], [0, 0]), (requests[4:], [len(prefix)])):
            admissions = map(present, executor.sampler.prefill(batch))
            assert [admission.prompt_cache_hit_tokens for admission in admissions] == hits
    finally:
        for prefill_request in requests:
            executor.sampler.release(prefill_request.request_id)
    assert executor.adapters.in_use == [], "released requests do not pin their snapshots"


@pytest.mark.parametrize("num_tiles", [CPU_PREFILL.max_tiles, 2])
def test_a_long_prompt_is_prefilled_in_chunks(
    engine: Engine, executor: DeviceExecutor, num_tiles: int, monkeypatch: pytest.MonkeyPatch
):
    """The samples have the logprobs of a forward pass. Earlier chunks of a prompt do not count as cache hits.

    The model was trained with a high learning rate, which magnifies rounding differences in float32.
    """
    runner = executor.sampler.runner
    layout = replace(runner.prefill_layout, shapes=replace(CPU_PREFILL, max_tiles=num_tiles))
    monkeypatch.setattr(runner, "prefill_layout", layout)
    prompt = tokens(560, seed=num_tiles)
    before: dict[str, Any] = engine.stats()
    running = engine.submit(request(tokens(20), max_tokens=100))
    result = run(engine, request(prompt, num_samples=3))
    assert result.prompt_cache_hit_tokens == 0
    assert engine.stats()["tokens_prefilled"] == before["tokens_prefilled"] + 20 + len(prompt)
    for sequence in result.sequences:
        (logprobs,) = forward_logprobs(engine, [np.concatenate([prompt, sequence.tokens])])
        np.testing.assert_allclose(logprobs[len(prompt) - 1 :], sequence.logprobs, atol=1e-3)
    assert len(running.result(TIMEOUT_S).sequences[0].tokens) == 100
    assert run(engine, request(prompt)).prompt_cache_hit_tokens == len(prompt) - 1
    withdrawn = PrefillRequest(request_id=-1, op=request(tokens(560, seed=100 + num_tiles)), first=0, count=1)
    assert executor.sampler.prefill([withdrawn]) == [None]
    executor.sampler.release(-1)
    for cache in executor.sampler.pages.caches:
        assert set(cache.references.values()) <= {1}, "only the prefix cache holds pages"
    assert not executor.sampler.prefiller.unfinished and executor.adapters.in_use == [], (
        "a request that is withdrawn between two chunks holds no adapter and no prefill state"
    )


def test_preempted_sequences_give_the_same_samples(engine: Engine, tmp_path: Path):
    """A cache for 1,024 tokens gives 8 sequences of up to 380 tokens the same results as a large cache."""
    prompts = [tokens(60 + 40 * row, seed=200 + row) for row in range(5)]
    requests = [request(prompt, weights=None, max_tokens=160, seed=row) for row, prompt in enumerate(prompts)]
    requests.append(request(prompts[0], weights=None, max_tokens=160, seed=9, num_samples=3))
    small = Engine(
        DeviceExecutor(
            make_settings(make_model(tmp_path / "model"), tmp_path / "checkpoints", cache_tokens=1024)
        )
    )
    futures = [small.submit(op) for op in requests]
    small.start()  # after all requests are queued, so that the sequences always run at the same time
    results = [future.result(TIMEOUT_S) for future in futures]
    stats: dict[str, Any] = small.stats()
    small.stop()
    assert stats["num_preemptions"] > 0
    assert stats["sequences_preempted"] == 0 and stats["slots_used"] == 0
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"] == 16
    for op, result in zip(requests, results, strict=True):
        for sequence, expected in zip(result.sequences, run(engine, op).sequences, strict=True):
            np.testing.assert_array_equal(sequence.tokens, expected.tokens)
            np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-4)


def test_greedy_sampling_takes_the_likeliest_token(engine: Engine):
    prompt = tokens(20)
    sequence = sample(engine, prompt, temperature=0.0, max_tokens=20)
    for position in range(len(sequence.tokens)):
        prefix = np.concatenate([prompt, sequence.tokens[:position]])
        candidates = (
            forward_logprobs(engine, [np.append(prefix, token) for token in range(CONFIG.vocab_size)])
            if position in (0, 9, 19)
            else None
        )
        if candidates is not None:
            assert int(np.argmax([logprobs[-1] for logprobs in candidates])) == sequence.tokens[position]


def test_a_seed_gives_the_same_tokens_in_every_batch(engine: Engine):
    prompt = tokens(30)
    alone = sample(engine, prompt, seed=11)
    others = [engine.submit(request(tokens(50, seed), seed=seed, max_tokens=30)) for seed in range(5)]
    in_batch = sample(engine, prompt, seed=11)
    for future in others:
        future.result(TIMEOUT_S)
    np.testing.assert_array_equal(alone.tokens, in_batch.tokens)
    assert list(sample(engine, prompt, seed=12).tokens) != list(alone.tokens)
    assert list(sample(engine, prompt, seed=11 + (1 << 40)).tokens) != list(alone.tokens)


def test_samples_of_one_request_differ_and_are_reproducible(engine: Engine):
    first, second = (run(engine, request(tokens(30), num_samples=9, seed=5)) for _ in range(2))
    sampled_tokens = [tuple(sequence.tokens) for sequence in first.sequences]
    assert len(set(sampled_tokens)) == 9
    assert sampled_tokens == [tuple(sequence.tokens) for sequence in second.sequences]


def test_without_a_seed_two_requests_differ(engine: Engine):
    first, second = (tuple(sample(engine, tokens(30), seed=None, max_tokens=20).tokens) for _ in range(2))
    assert first != second


def test_sequences_with_different_adapters_share_a_batch(engine: Engine):
    prompt = tokens(25)
    choices = ["first", "second", None, "second", "first"]
    alone = {weights: sample(engine, prompt, weights=weights, max_tokens=24) for weights in choices}
    futures = [engine.submit(request(prompt, weights=weights, max_tokens=24)) for weights in choices]
    for weights, future in zip(choices, futures, strict=True):
        sequence = future.result(TIMEOUT_S).sequences[0]
        np.testing.assert_array_equal(sequence.tokens, alone[weights].tokens)
        np.testing.assert_allclose(sequence.logprobs, alone[weights].logprobs, atol=1e-4)
    assert len({tuple(sequence.tokens) for sequence in alone.values()}) == 3


def test_a_sample_includes_its_stop_token_and_the_logprob(engine: Engine):
    prompt = tokens(20)
    free = sample(engine, prompt, max_tokens=30)
    stop_token = int(free.tokens[10])
    end = list(free.tokens).index(stop_token) + 1
    stopped = sample(engine, prompt, max_tokens=30, stop_token_ids=(stop_token, 3))
    assert stopped.stop_reason is StopReason.STOP and free.stop_reason is StopReason.LENGTH
    np.testing.assert_array_equal(stopped.tokens, free.tokens[:end])
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[:end], atol=1e-5)


def test_the_first_token_can_be_the_stop_token(engine: Engine):
    stop_token = int(sample(engine, tokens(20)).tokens[0])
    stopped = sample(engine, tokens(20), stop_token_ids=(stop_token,))
    assert list(stopped.tokens) == [stop_token] and stopped.stop_reason is StopReason.STOP


def test_eos_ends_a_sample_only_if_stop_at_eos_is_set(engine: Engine):
    """Some of 40 samples of a random model end with one of its two end tokens."""
    ends = [
        {int(token) for token in sequence.tokens[-1:]}
        for sequence in run(
            engine, request(tokens(9), num_samples=40, max_tokens=40, stop_at_eos=True, temperature=3.0)
        ).sequences
        if sequence.stop_reason is StopReason.STOP
    ]
    assert ends and set.union(*ends) <= set(CONFIG.eos_token_ids)
    free = run(engine, request(tokens(9), num_samples=40, max_tokens=40, temperature=3.0)).sequences
    assert all(sequence.stop_reason is StopReason.LENGTH for sequence in free)


def test_a_sample_ends_with_the_token_of_its_stop_string(engine: Engine):
    free = sample(engine, tokens(20), max_tokens=30)
    text = [byte_tokenizer().decode([int(token)]) for token in free.tokens]
    start = next(
        start
        for start in range(9, 28)
        if all(len(piece) == 1 and piece.isascii() for piece in text[start : start + 2])
    )
    stop = "".join(text[start : start + 2])
    assert stop not in "".join(text[: start + 1])
    stopped = sample(engine, tokens(20), max_tokens=30, stop_strings=("never this", stop))
    assert stopped.stop_reason is StopReason.STOP and len(stopped.logprobs) == start + 2
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: start + 2])


def test_without_max_tokens_a_sample_ends_at_the_context_length(engine: Engine):
    sequence = sample(engine, tokens(CONTEXT - 7), max_tokens=None)
    assert len(sequence.tokens) == 7 and sequence.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(
    "settings",
    [{"stop_token_ids": tuple(range(17))}, {"stop_token_ids": tuple(range(15)), "stop_at_eos": True}],
)
def test_too_many_stop_tokens_are_refused(engine: Engine, settings: dict):
    with pytest.raises(UserError, match="17 stop tokens"):
        run(engine, request(tokens(3), **settings))


def test_new_sampling_settings_compile_no_program(engine: Engine):
    """Settings of requests are arrays. Only lengths and the number of different adapters select a program."""
    run(engine, request(tokens(10), max_tokens=40))
    before = engine.stats()["programs"]
    for number, max_tokens in enumerate((1, 2, 7, 33, 100)):
        run(
            engine,
            request(
                tokens(11 + number),
                max_tokens=max_tokens,
                temperature=0.1 * number,
                top_p=0.5,
                top_k=7,
                stop_token_ids=(number,),
            ),
        )
        run(engine, request(tokens(11 + number), num_samples=number + 1, weights=None, prompt_logprobs=True))
    assert engine.stats()["programs"] == before


# --- sampling of one token ---

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.04, 0.01], np.float32))


def draws(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 5,
    top_p: float = 1.0,
    tempered: bool = False,
    filters: bool | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample `count` tokens from LOGITS with different sample indices. Return the tokens and logprobs."""
    settings = BatchSettings(
        seeds=np.tile(np.array([1, 2], np.uint32), (count, 1)),
        sample_indices=np.arange(count, dtype=np.int32),
        temperatures=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
    )
    run_sampling = jax.jit(sample_tokens, static_argnames=("tempered", "filters"))
    chosen, logprobs = run_sampling(
        np.tile(LOGITS + 3, (count, 1)),
        settings,
        np.zeros(count, np.int32),
        tempered=tempered,
        filters=filters,
    )
    return np.asarray(chosen), np.asarray(logprobs)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.5, 0.3, 0.15, 0.04, 0.01]),
        (
            {"temperature": 0.5},
            [0.25 / 0.3642, 0.09 / 0.3642, 0.0225 / 0.3642, 0.0016 / 0.3642, 0.0001 / 0.3642],
        ),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [5 / 8, 3 / 8, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        # The probabilities of the two likeliest tokens add up to 0.8, so the third token is included.
        (
            {"top_p": 0.9},
            [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0, 0],
        ),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.7, "top_k": 3}, [5 / 8, 3 / 8, 0, 0, 0]),
        # The first two tokens have 0.84 of the probability of the first three.
        ({"top_p": 0.82, "top_k": 3}, [5 / 8, 3 / 8, 0, 0, 0]),
    ],
)
def test_frequencies_follow_the_filtered_distribution(settings: dict, expected: list[float]):
    count = 4000
    chosen, logprobs = draws(count, **settings)
    np.testing.assert_allclose(np.bincount(chosen, minlength=5) / count, expected, atol=0.03)
    assert all(np.bincount(chosen, minlength=5)[np.array(expected) == 0] == 0)
    # The logprobs are those of the distribution before temperature and filters.
    np.testing.assert_allclose(logprobs, LOGITS[chosen], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 2}])
def test_programs_for_a_gpu_give_the_same_tokens(settings: dict):
    """The host selects a program with or without filters. A program with filters gives the same tokens for
    sequences without filters."""
    expected = draws(500, **settings)
    for filters in {True, bool(settings.keys() & {"top_k", "top_p"})}:
        for actual, desired in zip(draws(500, **settings, filters=filters), expected, strict=True):
            np.testing.assert_array_equal(actual, desired)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 2 * LOGITS), (2.0, LOGITS / 2), (0.0, LOGITS)])
def test_processed_logprobs_are_those_after_temperature(temperature: float, expected: np.ndarray):
    """Processed logprobs do not change the tokens. At temperature 0 the logprobs are those of the model.
    Filters do not change logprobs."""
    chosen, logprobs = draws(500, temperature=temperature, tempered=True, top_k=2)
    np.testing.assert_array_equal(chosen, draws(500, temperature=temperature, top_k=2)[0])
    np.testing.assert_allclose(logprobs, (expected - np.log(np.exp(expected).sum()))[chosen], atol=1e-5)


def test_a_server_set_to_processed_logprobs_returns_them(tmp_path):
    model = make_model(tmp_path / "model", replace(CONFIG, num_layers=1, max_position_embeddings=64))
    executor = DeviceExecutor(make_settings(model, tmp_path, max_num_seqs=1, logprobs_mode="processed"))
    prompt = tokens(20)
    base_options = {"weights": None, "topk_prompt_logprobs": CONFIG.vocab_size, "topk_sample_logprobs": 1}
    executor.sampler.prefill(
        [
            PrefillRequest(
                request_id=1,
                op=request(prompt, temperature=0.5, max_tokens=3, **base_options),
                first=0,
                count=1,
            )
        ]
    )
    executor.sampler.decode()
    (finished,) = executor.sampler.poll(dispatch_next=False)
    assert isinstance(finished, FinishedSequence)
    sequence = finished.sequence
    whole = request(np.concatenate([prompt, sequence.tokens]), max_tokens=1, **base_options)
    (admission,) = executor.sampler.prefill([PrefillRequest(request_id=2, op=whole, first=0, count=1)])
    top, topk = present(present(admission).topk_prompt_logprobs), present(sequence.topk)
    for position, (token, logprob) in enumerate(
        zip(sequence.tokens, sequence.logprobs, strict=True), start=len(prompt)
    ):
        tempered = top.logprobs[position] / 0.5
        tempered -= np.log(np.exp(tempered).sum())
        assert logprob == pytest.approx(tempered[list(top.token_ids[position]).index(token)], abs=1e-4)
        assert topk.logprobs[position - len(prompt), 0] == pytest.approx(tempered[0], abs=1e-4)


def likeliest_tokens(engine: Engine, context: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """Return the likeliest tokens after `context` and their logprobs, from forward passes over all tokens."""
    candidates = forward_logprobs(engine, [np.append(context, token) for token in range(CONFIG.vocab_size)])
    logprobs = np.array([entry[-1] for entry in candidates])
    order = np.argsort(-logprobs)[:count]
    return order.tolist(), logprobs[order]


def test_top_k_logprobs_equal_those_of_the_model(engine: Engine):
    prompt = tokens(20, seed=91)
    result = run(
        engine,
        request(
            prompt,
            num_samples=2,
            max_tokens=9,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=5,
            prompt_logprobs=True,
        ),
    )
    top = present(result.topk_prompt_logprobs)
    assert top.token_ids.shape == top.logprobs.shape == (20, 3)
    assert top.token_ids[0].tolist() == [0, 0, 0] and top.logprobs[0].tolist() == [NO_LOGPROB] * 3
    for position in (1, 13, 19):
        ids, logprobs = likeliest_tokens(engine, prompt[:position], 3)
        assert top.token_ids[position].tolist() == ids
        np.testing.assert_allclose(top.logprobs[position], logprobs, atol=1e-4)
    for sequence in result.sequences:
        topk = present(sequence.topk)
        assert topk.token_ids.shape == (9, 5)
        for position in (0, 4, 8):
            ids, logprobs = likeliest_tokens(engine, np.concatenate([prompt, sequence.tokens[:position]]), 5)
            assert topk.token_ids[position].tolist() == ids
            np.testing.assert_allclose(topk.logprobs[position], logprobs, atol=1e-4)
    plain = run(engine, request(prompt, num_samples=2, max_tokens=9))
    assert plain.topk_prompt_logprobs is None and plain.sequences[0].topk is None
    np.testing.assert_array_equal(plain.sequences[1].tokens, result.sequences[1].tokens)


def test_target_logprobs_have_the_layout_of_the_targets(engine: Engine):
    prompt = tokens(12, seed=92)
    requested_tokens = np.full((11, 3), -1, np.int32)
    requested_tokens[0, 2], requested_tokens[4], requested_tokens[10, 1] = 7, (9, 8, 8), 200
    dense = run(
        engine,
        request(
            prompt,
            weights="second",
            target_prompt_tokens=CsrMatrix(values=requested_tokens.reshape(-1), shape=(11, 3)),
        ),
    )
    scores = present(dense.target_prompt_logprobs).dense()
    assert scores.shape == (11, 3) and np.all((scores == 0) == (requested_tokens < 0))
    for row, column in zip(*np.nonzero(requested_tokens >= 0), strict=True):
        (expected,) = forward_logprobs(
            engine, [np.append(prompt[: row + 1], requested_tokens[row, column])], "second"
        )
        assert scores[row, column] == pytest.approx(expected[-1], abs=1e-4)

    rows, columns = np.nonzero(requested_tokens >= 0)
    crow_indices = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=11))])
    sparse = CsrMatrix(
        values=requested_tokens[rows, columns],
        shape=(11, 1 << 30),
        crow_indices=crow_indices,
        col_indices=columns * 1_000_000,
    )
    result = run(engine, request(prompt, weights="second", target_prompt_tokens=sparse))
    answer = present(result.target_prompt_logprobs)
    np.testing.assert_array_equal(answer.crow_indices, crow_indices)
    np.testing.assert_array_equal(answer.values, scores[rows, columns])


def test_prompt_logprobs_can_be_limited_to_the_last_tokens(engine: Engine):
    prompt = tokens(15, seed=93)
    full = run(engine, request(prompt, prompt_logprobs=True, topk_prompt_logprobs=2))
    last = run(
        engine, request(prompt, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=4)
    )
    logprobs = present(last.prompt_logprobs)
    assert np.isnan(logprobs[:11]).all()
    np.testing.assert_array_equal(logprobs[11:], present(full.prompt_logprobs)[11:])
    top, full_top = present(last.topk_prompt_logprobs), present(full.topk_prompt_logprobs)
    assert (top.logprobs[:11] == NO_LOGPROB).all()
    np.testing.assert_array_equal(top.token_ids[11:], full_top.token_ids[11:])


def test_scoring_does_not_change_programs_of_plain_sampling(engine: Engine):
    run(engine, request(tokens(10)))
    before: Any = engine.stats()["programs"]
    run(engine, request(tokens(10), topk_prompt_logprobs=3, topk_sample_logprobs=4))
    run(engine, request(tokens(11), topk_prompt_logprobs=4))
    after: Any = engine.stats()["programs"]
    assert {name: count for name, count in after.items() if count != before.get(name)}.keys() <= {"score"}


def test_find_stop_looks_back_only_as_far_as_a_stop_string():
    tokenizer = byte_tokenizer()
    text = tokenizer.encode("héllo wörld\n\nbye").ids
    assert find_stop(tokenizer, text, ("\n\n",), new=len(text)) == len(text) - 3
    assert find_stop(tokenizer, text[:-3], ("\n\n",), new=1) == len(text) - 3
    assert find_stop(tokenizer, text, ("\n\n",), new=2) is None
    assert find_stop(tokenizer, text, ("ö",), new=len(text)) == len(tokenizer.encode("héllo wö").ids)
    assert find_stop(tokenizer, text, ("nope", "d\n"), new=len(text)) == len(text) - 4
    assert find_stop(tokenizer, [], ("x",), new=0) is None


def test_find_stop_finds_a_space_that_decoding_removes():
    """The decoders of SentencePiece models remove the space at the beginning of the decoded tokens."""
    tokenizer = Tokenizer(models.WordLevel({"b": 0, "\u2581": 1, "a": 2, "\u2581a": 3}, unk_token="b"))
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    for text, stop, expected in (
        ([0, 1, 2], " a", 3),
        ([0, 1], " ", 2),
        ([0, 0, 3, 0], " a", 3),
        ([0, 2, 0], " a", None),
    ):
        assert find_stop(tokenizer, text, (stop,), new=len(text)) == expected


def test_results_have_the_right_types_and_lengths(engine: Engine):
    result = run(engine, request(tokens(5), num_samples=2))
    assert isinstance(result, SampleResult) and result.prompt_logprobs is None
    for sequence in result.sequences:
        assert sequence.tokens.dtype == np.int32 and sequence.logprobs.dtype == np.float32
        assert len(sequence.tokens) == len(sequence.logprobs) == 12 and (sequence.logprobs <= 0).all()


def test_streaming_does_not_change_the_sample(engine: Engine):
    class TokenRecorder:
        streams_tokens = True

        def __init__(self) -> None:
            self.tokens_of: dict[int, list[int]] = {0: [], 1: []}

        def tokens(self, index, tokens, logprobs) -> None:
            assert len(tokens) == len(logprobs)
            self.tokens_of[index] += tokens

        def is_waiting(self) -> bool:
            return True

    op = Sample(
        weights="first",
        prompt=tokens(20),
        settings=SamplingSettings(max_tokens=30, seed=5, stop_at_eos=False),
        num_samples=2,
    )
    recorder = TokenRecorder()
    streamed, expected = engine.submit(op, recorder).result(TIMEOUT_S), run(engine, op)
    for index, sequence in enumerate(streamed.sequences):
        assert np.array_equal(sequence.tokens, expected.sequences[index].tokens)
        assert recorder.tokens_of[index] == sequence.tokens[: len(recorder.tokens_of[index])].tolist()
        assert len(recorder.tokens_of[index]) >= 16


def test_all_kinds_of_tokens_count_as_in_the_tokenizers_library(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))
    words = Tokenizer(models.WordLevel({"a": 4, "b": 7}, "a"))
    for tokenizer in (byte_tokenizer(), unigram, words):
        for _ in range(2):
            last = max(tokenizer.get_vocab().values())
            tokenizer.save(str(path))
            check_tokenizer(tmp_path, last + 1)
            with pytest.raises(ConfigError, match=f"has id {last}, but"):
                check_tokenizer(tmp_path, last)
            tokenizer.add_tokens(["<tool>"])


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer, settings = byte_tokenizer(), tmp_path / "tokenizer_config.json"
    check_tokenizer(tmp_path, 1)  # no tokenizer
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check_tokenizer(tmp_path, 256)
    with pytest.raises(ConfigError, match="has id 255, but the model has only 255 tokens"):
        check_tokenizer(tmp_path, 255)
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"token '<pad>' has id 256, .* resize .* to 257 tokens"):
        check_tokenizer(tmp_path, 256)
    for pad_token in ("<pad>", {"content": "<pad>"}):
        settings.write_text(json.dumps({"pad_token": pad_token}))
        check_tokenizer(tmp_path, 256)
    settings.write_text(json.dumps({"added_tokens_decoder": {"257": {"content": "<tool>"}}}))
    with pytest.raises(ConfigError, match="token '<tool>' has id 257"):
        check_tokenizer(tmp_path, 257)
    for damaged in ("{}", '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": {"a'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(ConfigError, match="the tokenizer is not valid: "):
            check_tokenizer(tmp_path, 256)
    settings.write_text("{")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="the tokenizer is not valid: Expecting property name"):
        check_tokenizer(tmp_path, 256)
