"""Sampling by an external vLLM or SGLang server, with a real engine. A fake of the external server computes
in numpy."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.engine.engine import STOPPING, Engine
from skyrl_tx_server.engine.operations import (
    CreateModel,
    DropSnapshot,
    LoadWeights,
    LoraSpec,
    Op,
    Sample,
    SampleResult,
    SamplingSettings,
    SaveSampler,
    StopReason,
)
from skyrl_tx_server.errors import ConfigError, ConflictError, NotFoundError, SamplerError, ServerError
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.external import adapters as external_adapters
from skyrl_tx_server.external.sampling import ExternalSampling
from skyrl_tx_server.external.server import connect
from skyrl_tx_server.external.wire import ReturnedSample, SamplingRequest, cut_at_stop
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import initial_optimizer_state
from skyrl_tx_server.model.lora.adapter import init_adapter
from skyrl_tx_server.model.weights import adapter_to_arrays
from tests.fakes.external_sampler import ExternalSampler, sampling
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

PROMPT = np.array([72, 101, 108, 108, 111], np.int32)
SPEC = LoraSpec(rank=4)
TWENTY_TOKENS = SamplingSettings(max_tokens=20, stop_at_eos=False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def checkpoints_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def engine(model_dir: Path, checkpoints_dir: Path) -> Iterator[Engine]:
    """Yield a running engine with the model "m"."""
    engine = Engine(DeviceExecutor(make_settings(model_dir, checkpoints_dir)))
    engine.start()
    engine.submit(CreateModel(model_id="m", lora=SPEC)).result(120)
    yield engine
    engine.stop()


def load_random_adapter(engine: Engine, checkpoints_dir: Path, size: float, *, seed: int = 0) -> None:
    """Load an adapter with random values of standard deviation `size` into the model "m".

    Training an adapter would be slower, because the training programs must be compiled.
    """
    random, checkpoint_name = np.random.default_rng(seed), uuid.uuid4().hex
    arrays = adapter_to_arrays(init_adapter(CONFIG, SPEC, 8), CONFIG, SPEC)
    arrays = {name: random.normal(0, size, array.shape).astype(np.float32) for name, array in arrays.items()}
    store = CheckpointStore(checkpoints_dir, "local/tiny")
    path = f"tinker://m/weights/{checkpoint_name}"
    store.write(path, arrays | initial_optimizer_state(arrays), lora=SPEC, step=0, user_metadata={})
    engine.submit(LoadWeights(model_id="m", path=path, optimizer=False)).result(60)


@pytest.fixture(params=["vllm"])
def sampler(model_dir: Path, request: pytest.FixtureRequest) -> ExternalSampler:
    return ExternalSampler(model_dir, kind=request.param)


@pytest.fixture
def url(sampler: ExternalSampler) -> Iterator[str]:
    with sampling(sampler) as url:
        yield url


@asynccontextmanager
async def connected(
    url: str,
    engine: Engine,
    checkpoints_dir: Path,
    model_dir: Path,
    *,
    sampler_check: float = 0.0,
    max_adapters: int = 8,
) -> AsyncIterator[ExternalSampling]:
    adapters = checkpoints_dir / "sampler_adapters"
    options = SamplerOptions(sampler_url=url, sampler_timeout_s=60.0, sampler_check=sampler_check)
    async with connect(options, base_model="local/tiny", adapters=adapters) as server:
        store = CheckpointStore(checkpoints_dir, "local/tiny")
        external = ExternalSampling(
            engine, server, store, options, adapters=adapters, max_adapters=max_adapters, model_dir=model_dir
        )
        try:
            yield external
        finally:
            await external.close()


@pytest.fixture
async def external(
    url: str, engine: Engine, checkpoints_dir: Path, model_dir: Path
) -> AsyncIterator[ExternalSampling]:
    async with connected(url, engine, checkpoints_dir, model_dir) as external:
        yield external


async def run_op(external: ExternalSampling, op: Op) -> SampleResult:
    result = await asyncio.wrap_future(external.submit(op))
    assert not isinstance(op, Sample) or isinstance(result, SampleResult)
    return result  # type: ignore[return-value]


def sample(
    weights: str | None = None, settings: SamplingSettings = TWENTY_TOKENS, **options: object
) -> Sample:
    return Sample(weights=weights, prompt=PROMPT, settings=settings, **options)  # type: ignore[arg-type]


def engine_logprobs(engine: Engine, weights: str | None, tokens: np.ndarray) -> np.ndarray:
    """Return the logprobs of `tokens` after PROMPT, computed by the engine."""
    prompt_and_tokens = np.concatenate([PROMPT, tokens])
    op = Sample(
        weights=weights,
        prompt=prompt_and_tokens,
        settings=SamplingSettings(max_tokens=1, temperature=0.0),
        prompt_logprobs=True,
    )
    result = engine.submit(op).result(60)
    assert isinstance(result, SampleResult) and result.prompt_logprobs is not None
    return result.prompt_logprobs[len(PROMPT) :]


@pytest.mark.parametrize("sampler", ["vllm", "sglang"], indirect=True)
async def test_samples_come_from_the_adapter_of_their_snapshot(
    external: ExternalSampling, sampler: ExternalSampler, engine: Engine, checkpoints_dir: Path
) -> None:
    load_random_adapter(engine, checkpoints_dir, 0.05, seed=1)
    await run_op(external, SaveSampler(model_id="m", weights="s1"))
    first_result = await run_op(external, sample("s1", num_samples=2))
    load_random_adapter(engine, checkpoints_dir, 0.05, seed=2)
    await run_op(external, SaveSampler(model_id="m", weights="s2"))
    for weights, result in (
        ("s1", first_result),
        ("s2", await run_op(external, sample("s2"))),
        ("s1", await run_op(external, sample("s1"))),
        (
            None,
            await run_op(
                external, sample(None, replace(TWENTY_TOKENS, temperature=0.7, top_k=40, top_p=0.9))
            ),
        ),
    ):
        for sequence in result.sequences:
            assert len(sequence.tokens) == 20 and sequence.stop_reason is StopReason.LENGTH
            np.testing.assert_allclose(
                sequence.logprobs, engine_logprobs(engine, weights, sequence.tokens), atol=1e-4
            )
    adapter_effect = np.abs(
        first_result.sequences[0].logprobs - engine_logprobs(engine, None, first_result.sequences[0].tokens)
    ).mean()
    assert adapter_effect > 0.05, "the adapter has a measurable effect"
    assert len({body["adapter"] for body in sampler.received}) == 3 and len(sampler.received) == 4
    assert first_result.prompt_cache_hit_tokens == (3 if sampler.kind == "sglang" else 0)


async def test_a_dropped_snapshot_is_unloaded_after_its_samples(
    external: ExternalSampling, sampler: ExternalSampler, checkpoints_dir: Path
) -> None:
    saved = external.submit(SaveSampler(model_id="m", weights="short"))
    sampled = external.submit(sample("short"))  # waits for the save, which is not awaited here
    dropped = external.submit(DropSnapshot(weights="short"))
    await asyncio.gather(
        asyncio.wrap_future(saved), asyncio.wrap_future(sampled), asyncio.wrap_future(dropped)
    )
    await asyncio.to_thread(sampler.wait_until, lambda: not sampler.adapters)
    assert sampler.received[0]["adapter"].startswith("skyrl-")
    with pytest.raises(NotFoundError, match="freed with its session"):
        external.submit(sample("short"))


async def test_adapters_are_evicted_and_reloaded_from_checkpoints(
    url: str, sampler: ExternalSampler, engine: Engine, checkpoints_dir: Path, model_dir: Path
) -> None:
    path = "tinker://m/sampler_weights/named"
    # the engine saves the checkpoint directly, as an earlier run of the server would have done
    await asyncio.wrap_future(engine.submit(SaveSampler(model_id="m", weights=path)))
    async with connected(url, engine, checkpoints_dir, model_dir, max_adapters=1) as external:
        await run_op(external, SaveSampler(model_id="m", weights="s1"))
        for weights in ("s1", path, "s1", path):
            result = await run_op(external, sample(weights))
            np.testing.assert_allclose(
                result.sequences[0].logprobs,
                engine_logprobs(engine, weights, result.sequences[0].tokens),
                atol=1e-4,
            )
            await asyncio.to_thread(sampler.wait_until, lambda: len(sampler.adapters) == 1)
    assert len({body["adapter"] for body in sampler.received}) == 4, "each reload has a new adapter name"
    foreign_dir = checkpoints_dir / "sampler_adapters" / "foreign"
    foreign_dir.mkdir()
    async with connected(url, engine, checkpoints_dir, model_dir):
        assert not sampler.adapters, "a new server unloads the adapters of the previous one"
        assert [*foreign_dir.parent.iterdir()] == [foreign_dir], "the files of those adapters are deleted"
    foreign_dir.rmdir()


async def test_an_adapter_that_failed_to_load_needs_no_room(
    url: str, sampler: ExternalSampler, engine: Engine, checkpoints_dir: Path, model_dir: Path
) -> None:
    async with connected(url, engine, checkpoints_dir, model_dir, max_adapters=2) as external:
        await run_op(external, SaveSampler(model_id="m", weights="s1"))
        await run_op(external, sample("s1"))
        with pytest.raises(NotFoundError):
            await run_op(external, sample("tinker://m/sampler_weights/absent"))
        await run_op(external, SaveSampler(model_id="m", weights="s2"))
        await run_op(external, sample("s2"))
        assert len(sampler.adapters) == 2


async def test_a_failed_duplicate_save_keeps_the_checkpoint(external: ExternalSampling) -> None:
    path = "tinker://m/sampler_weights/twice"
    saves = [external.submit(SaveSampler(model_id="m", weights=path)) for _ in range(2)]
    results = await asyncio.gather(*map(asyncio.wrap_future, saves), return_exceptions=True)
    assert isinstance(results[1], ConflictError)
    assert len((await run_op(external, sample(path))).sequences[0].tokens) == 20


async def test_an_incomplete_adapter_is_written_again(
    external: ExternalSampling, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "tinker://m/sampler_weights/incomplete"
    await asyncio.wrap_future(engine.submit(SaveSampler(model_id="m", weights=path)))

    def fail(directory: Path, *arguments: object) -> None:
        directory.mkdir(parents=True)
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(external_adapters, "write_adapter", fail)
        with pytest.raises(OSError, match="No space left"):
            await run_op(external, sample(path))
    assert len((await run_op(external, sample(path))).sequences[0].tokens) == 20


async def test_a_restarted_sampler_gets_its_adapters_again(
    sampler: ExternalSampler, engine: Engine, checkpoints_dir: Path, model_dir: Path
) -> None:
    with sampling(sampler) as url:
        connection = connected(url, engine, checkpoints_dir, model_dir)
        external = await connection.__aenter__()
        await run_op(external, SaveSampler(model_id="m", weights="kept"))
        await run_op(external, sample("kept"))
    with pytest.raises(SamplerError, match="cannot be reached"):
        await run_op(external, sample("kept"))
    # snapshots can be saved while the sampler is down
    await run_op(external, SaveSampler(model_id="m", weights="meanwhile"))
    with sampling(sampler, port=int(url.rpartition(":")[2])):
        for weights in ("kept", "meanwhile"):
            results = await asyncio.gather(*(run_op(external, sample(weights)) for _ in range(3)))
            np.testing.assert_allclose(
                results[0].sequences[0].logprobs,
                engine_logprobs(engine, weights, results[0].sequences[0].tokens),
                atol=1e-4,
            )
        assert len(sampler.adapters) == 2
        await connection.__aexit__(None, None, None)


async def test_another_base_model_is_detected_before_samples_are_used(
    engine: Engine, checkpoints_dir: Path, model_dir: Path, sampler: ExternalSampler
) -> None:
    sampler.model.base = sampler.model.base | {
        "model.norm.weight": sampler.model.base["model.norm.weight"][::-1]
        * np.linspace(-2, 2, CONFIG.hidden_size)
    }
    with sampling(sampler) as url:
        async with connected(url, engine, checkpoints_dir, model_dir) as external:
            for _ in range(2):
                with pytest.raises(
                    SamplerError,
                    match=r"differ from this server's by \d+\.\d+ nats per token\. The sampler runs",
                ):
                    await run_op(external, sample())


async def test_an_ignored_adapter_is_detected(
    external: ExternalSampling, sampler: ExternalSampler, engine: Engine, checkpoints_dir: Path
) -> None:
    load_random_adapter(engine, checkpoints_dir, 0.5)
    sampler.leaves_adapters_out = True
    await run_op(external, SaveSampler(model_id="m", weights="ignored"))
    await run_op(external, sample())
    with pytest.raises(SamplerError, match=r"logprobs of ignored differ .* does not apply the adapter"):
        await run_op(external, sample("ignored"))


def remove(key: str) -> Callable[[dict], object]:
    return lambda answer: answer["choices"][0].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("token_ids"), "the field 'token_ids' is missing"),
        (remove("logprobs"), "the field 'logprobs' is missing"),
        (lambda answer: answer["choices"][0]["token_ids"].pop(), "19 token ids, but 20 logprobs"),
        (
            lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(3, None),
            "not a finite number",
        ),
        (
            lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(3, -9999.0),
            "not a finite number",
        ),
        (lambda answer: answer["choices"].pop(), "0 samples|index out of range"),
        (lambda answer: answer["choices"][0].update(prompt_token_ids=[1]), "differ from the prompt"),
        (
            lambda answer: (
                answer["choices"][0]["token_ids"].pop(),
                answer["choices"][0]["logprobs"]["token_logprobs"].pop(),
            ),
            "after 19 of 20 tokens",
        ),
    ],
)
async def test_an_invalid_reply_fails_only_its_request(
    external: ExternalSampling, sampler: ExternalSampler, change: Callable[[dict], object], message: str
) -> None:
    sampler.change_reply = change
    with pytest.raises(SamplerError, match=message):
        await run_op(external, sample())
    sampler.change_reply = lambda answer: None
    await run_op(external, sample())


def test_a_sample_with_too_many_tokens_is_refused() -> None:
    settings = SamplingSettings(stop_token_ids=(7,), stop_at_eos=False)
    request = SamplingRequest(prompt=[1], num_samples=1, max_tokens=2, stop_tokens=(7,), settings=settings)
    tokens = np.array([1, 2, 7], np.int32)
    sample = ReturnedSample(tokens=tokens, logprobs=np.zeros(3, np.float32), finish="stop")
    with pytest.raises(SamplerError, match="after 3 of 2 tokens"):
        cut_at_stop(sample, request, None)


async def test_samples_end_at_the_same_tokens_as_in_the_engine(
    external: ExternalSampling, sampler: ExternalSampler
) -> None:
    long_settings = replace(TWENTY_TOKENS, max_tokens=60, seed=5)
    tokens = (await run_op(external, sample(None, long_settings))).sequences[0].tokens
    stop_token = int(tokens[10])
    end = tokens.tolist().index(stop_token) + 1
    stopped = (
        await run_op(external, sample(None, replace(long_settings, stop_token_ids=(stop_token,))))
    ).sequences[0]
    assert stopped.tokens.tolist() == tokens[:end].tolist() and stopped.stop_reason is StopReason.STOP

    stop_string = sampler.tokenizer.decode(tokens[8:10].tolist(), skip_special_tokens=False)
    stopped = (
        await run_op(external, sample(None, replace(long_settings, stop_strings=(stop_string,))))
    ).sequences[0]
    assert len(stopped.tokens) <= 10 and stopped.stop_reason is StopReason.STOP

    def add_two_tokens(answer: dict) -> None:
        """vLLM may return tokens after a stop string, because it checks stop strings per block of tokens."""
        answer["choices"][0]["token_ids"] += [65, 66]
        answer["choices"][0]["logprobs"]["token_logprobs"] += [-1.0, -1.0]

    sampler.change_reply = add_two_tokens
    trimmed = (
        await run_op(external, sample(None, replace(long_settings, stop_strings=(stop_string,))))
    ).sequences[0]
    assert trimmed.tokens.tolist() == stopped.tokens.tolist() and len(trimmed.logprobs) == len(trimmed.tokens)


@pytest.mark.parametrize("sampler", ["vllm", "sglang"], indirect=True)
async def test_the_engine_samples_if_the_sampler_lacks_a_setting(
    external: ExternalSampling, sampler: ExternalSampler
) -> None:
    prompt_scored = await run_op(
        external, sample(None, replace(TWENTY_TOKENS, max_tokens=1), prompt_logprobs=True)
    )
    assert prompt_scored.prompt_logprobs is not None
    topk = await run_op(external, sample(None, replace(TWENTY_TOKENS, max_tokens=1), topk_sample_logprobs=2))
    assert topk.sequences[0].topk is not None
    assert not sampler.received
    await run_op(external, sample(None, replace(TWENTY_TOKENS, max_tokens=1, seed=1)))
    await run_op(external, sample(None, replace(TWENTY_TOKENS, max_tokens=1, stop_token_ids=(5,))))
    assert len(sampler.received) == (0 if sampler.kind == "sglang" else 2)
    await run_op(external, sample(None, SamplingSettings(max_tokens=20)))
    assert sampler.received[-1]["stop_token_ids"] == [257, 258] and sampler.received[-1]["ignore_eos"] is (
        sampler.kind == "vllm"
    )


async def test_cancelling_a_sample_closes_its_request(
    external: ExternalSampling, sampler: ExternalSampler
) -> None:
    sampler.hold_requests = True
    future = external.submit(sample())
    await asyncio.to_thread(sampler.wait_until, lambda: sampler.received)
    future.cancel()
    await asyncio.to_thread(sampler.wait_until, lambda: sampler.aborted == 1)


async def test_a_sampler_that_does_not_answer_times_out(
    external: ExternalSampling, sampler: ExternalSampler
) -> None:
    sampler.hold_requests = True
    # the timeout is set after `connect`, because the requests of `connect` may take longer
    external._server._client._timeout_s = 0.2
    with pytest.raises(SamplerError, match=r"did not reply within sampler_timeout_s=0\.2"):
        await run_op(external, sample())
    assert external.stats()["sampler_failed"] == 1


async def test_stopping_the_server_fails_waiting_samples(
    external: ExternalSampling, sampler: ExternalSampler
) -> None:
    sampler.hold_requests = True
    future = external.submit(sample())
    await asyncio.to_thread(sampler.wait_until, lambda: sampler.received)
    await external.close()
    with pytest.raises(ServerError, match=STOPPING):
        await asyncio.wrap_future(future)


async def test_a_persistent_logprob_mismatch_is_logged_and_counted(
    url: str,
    sampler: ExternalSampler,
    engine: Engine,
    checkpoints_dir: Path,
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(url, engine, checkpoints_dir, model_dir, sampler_check=1.0) as external:
        await run_op(external, sample())

        def lower_logprobs(answer: dict) -> None:
            logprobs = answer["choices"][0]["logprobs"]
            logprobs["token_logprobs"] = [logprob - 0.1 for logprob in logprobs["token_logprobs"]]

        sampler.change_reply = lower_logprobs
        with caplog.at_level(logging.WARNING, "skyrl_tx_server.external.logprob_mismatch"):
            while not (
                warnings := [
                    record.getMessage()
                    for record in caplog.records
                    if record.name == "skyrl_tx_server.external.logprob_mismatch"
                ]
            ):
                await run_op(external, sample())
        (warning,) = warnings
        assert (
            "nats per token" in warning
            and "another base model" in warning
            and "SGLANG_RETURN_ORIGINAL_LOGPROB" in warning
        )
        stats = external.stats()
        assert (
            0.05
            < float(str(stats["sampler_difference_mean"]))
            < 0.1
            == pytest.approx(stats["sampler_difference_max"], abs=1e-4)
        )
        assert 0 < float(str(stats["sampler_difference_kl"])) < 0.0052


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "local/other"}, "serves local/other; start it with --served-model-name local/tiny"),
        ({"kind": "llama.cpp"}, "owned_by=llama.cpp"),
        ({"max_model_len": 300}, "context of the sampler has 300 tokens, but that of this server has 600"),
        ({"loads_adapters": False}, "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
)
async def test_an_unsuitable_sampler_is_refused_at_the_start(
    model_dir: Path, engine: Engine, checkpoints_dir: Path, changes: dict[str, object], message: str
) -> None:
    loads_adapters = bool(changes.pop("loads_adapters", True))
    sampler = ExternalSampler(model_dir, **changes)  # type: ignore[arg-type]
    sampler.loads_adapters = loads_adapters
    with sampling(sampler) as url, pytest.raises(ConfigError, match=message):
        async with connected(url, engine, checkpoints_dir, model_dir):
            pass


async def test_an_unreachable_sampler_is_refused_at_the_start(
    engine: Engine, checkpoints_dir: Path, model_dir: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"sampler_url=http://127\.0\.0\.1:9: the sampler at .* cannot be reached"
    ):
        async with connected("http://127.0.0.1:9", engine, checkpoints_dir, model_dir):
            pass
