"""Qwen3 with sliding windows in some layers gives the results of Hugging Face transformers, which
scripts/make_reference_fixtures.py has written."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.loss_spec import LossFn
from skyrl_tx_server.engine.operations import (
    CreateModel,
    ForwardBackward,
    LoraSpec,
    Sample,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.shapes import train_shapes
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params
from skyrl_tx_server.sampling import model_runner
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import pack
from skyrl_tx_server.training.train_step import forward_backward
from tests.fakes.tiny_model import make_settings
from tests.server.test_families import FAMILIES, difference, write_config

FIXTURE = FAMILIES / "qwen3_sliding_window"
WINDOW = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("checkpoints")
    engine = Engine(DeviceExecutor(make_settings(FIXTURE, directory, max_context_length=256, max_num_seqs=3)))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def decoding() -> dict[str, np.ndarray]:
    """Return a prompt and its greedy continuation by Hugging Face, with the logprobs of both."""
    return dict(np.load(FIXTURE / "decoding.npz"))


def greedy(
    engine: Engine, prompt: np.ndarray, max_tokens: int, *, prompt_logprobs: bool = False
) -> SampleResult:
    settings = SamplingSettings(max_tokens=max_tokens, temperature=0.0, stop_at_eos=False)
    op = Sample(
        prompt=prompt, weights=None, num_samples=1, settings=settings, prompt_logprobs=prompt_logprobs
    )
    result = engine.submit(op).result(600)
    assert isinstance(result, SampleResult)
    return result


def test_consecutive_layers_with_equal_attention_are_one_stack() -> None:
    stacks = stacks_of(load_model_config(FIXTURE))
    assert [(stack.layers, stack.attention.sliding_window) for stack in stacks] == [
        (range(1), None),
        (range(1, 3), WINDOW),
    ]


@pytest.mark.parametrize("windows", [(), (None, WINDOW + 1, WINDOW + 1), (WINDOW, WINDOW, WINDOW)])
def test_another_window_gives_different_logits(windows: tuple[int | None, ...]) -> None:
    config = replace(load_model_config(FIXTURE), sliding_windows=windows)
    assert difference(config, "qwen3_sliding_window") > 0.01


def test_prefill_gives_hugging_faces_prompt_logprobs(engine: Engine, decoding: dict[str, np.ndarray]) -> None:
    result = greedy(engine, decoding["prompt"], 1, prompt_logprobs=True)
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(result.prompt_logprobs[1:], decoding["prompt_logprobs"], atol=1e-4)


def test_decoding_gives_hugging_faces_tokens_and_logprobs(
    engine: Engine, decoding: dict[str, np.ndarray]
) -> None:
    """The prompt and the completion are longer than the window, and the sequence has several KV pages."""
    (sequence,) = greedy(engine, decoding["prompt"], len(decoding["tokens"])).sequences
    assert sequence.tokens.tolist() == decoding["tokens"].tolist()
    np.testing.assert_allclose(sequence.logprobs, decoding["logprobs"], atol=1e-4)


def test_a_cached_prompt_continues_with_the_same_tokens(
    engine: Engine, decoding: dict[str, np.ndarray]
) -> None:
    prompt = np.concatenate([decoding["prompt"], decoding["tokens"][:30]])
    greedy(engine, decoding["prompt"], 1)
    result = greedy(engine, prompt, 20)
    assert result.prompt_cache_hit_tokens >= 64
    assert result.sequences[0].tokens.tolist() == decoding["tokens"][30:50].tolist()


def test_training_gives_hugging_faces_logprobs(engine: Engine, decoding: dict[str, np.ndarray]) -> None:
    """All three sequences begin with the prompt, so the micro-batch contains them as one prefix tree."""
    text = np.concatenate([decoding["prompt"], decoding["tokens"]])
    expected = np.concatenate([decoding["prompt_logprobs"], decoding["logprobs"]])
    lengths = (len(text), len(text) - 20)
    data = tuple(TrainDatum(tokens=text[: length - 1], target_tokens=text[1:length]) for length in lengths)
    third = np.concatenate([text[:90], text[:40]])
    data += (TrainDatum(tokens=third[:-1], target_tokens=third[1:]),)
    engine.submit(CreateModel(model_id="m", lora=LoraSpec(rank=4))).result(600)
    op = ForwardBackward(model_id="m", data=data, loss_fn=LossFn.CROSS_ENTROPY)
    logprobs = engine.submit(op).result(600).logprobs
    for length, actual in zip((*lengths, 90), logprobs, strict=True):
        np.testing.assert_allclose(actual[: length - 1], expected[: length - 1], atol=1e-4)


def test_gradients_equal_hugging_faces() -> None:
    config, fixture = load_model_config(FIXTURE), load_file(FIXTURE / "lora_gradients.safetensors")
    spec = LoraSpec(rank=int(fixture["rank"][0]), alpha=float(fixture["alpha"][0]))
    parts = {
        kind: {
            name.removeprefix(f"{kind}."): array
            for name, array in fixture.items()
            if name.startswith(f"{kind}.")
        }
        for kind in ("adapter", "gradient")
    }
    adapter = adapter_from_arrays(parts["adapter"], config, spec, spec.rank)
    zeros = adapter_from_arrays(
        {name: np.zeros_like(array) for name, array in parts["adapter"].items()}, config, spec, spec.rank
    )
    data = [
        TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:], weights=weights)
        for tokens, weights in zip(fixture["tokens"], fixture["weights"], strict=True)
    ]
    shapes = train_shapes(max_context_length=128, tokens_per_batch=128)
    (batch,) = pack(data, [np.ones(len(datum.tokens), bool) for datum in data], shapes)
    gradient, _ = forward_backward(
        adapter,
        zeros,
        load_params(FIXTURE, config, "float32"),
        batch.arrays,
        select_loss(LossFn.CROSS_ENTROPY),
        config=config,
    )
    actual = adapter_to_arrays(gradient, config, spec)
    for name, expected in parts["gradient"].items():
        np.testing.assert_allclose(actual[name], expected, rtol=2e-3, atol=2e-4)


def test_a_gpu_decodes_sliding_windows_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "on_gpu", lambda: True)
    config = load_model_config(FIXTURE)
    assert not model_runner.decodes_in_place(config)
    assert model_runner.decodes_in_place(replace(config, sliding_windows=()))


def test_layer_types_and_max_window_layers_give_equal_configs(tmp_path: Path) -> None:
    write_config(tmp_path, "qwen3_sliding_window", layer_types=None)
    assert load_model_config(tmp_path) == load_model_config(FIXTURE)
    write_config(tmp_path, "qwen3_sliding_window", use_sliding_window=False)
    assert load_model_config(tmp_path).sliding_windows == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "a window must have at least 1 position"),
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"layer_types": ["full_attention"]}, "of the 3 layers must be full_attention"),
        (
            {"layer_types": ["chunked_attention"] * 3},
            "of the 3 layers must be full_attention",
        ),
    ],
)
def test_the_error_for_an_unsupported_window_is_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_model_config(write_config(tmp_path, "qwen3_sliding_window", **changes))
    assert "\n" not in str(error.value)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
