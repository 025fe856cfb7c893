"""On a CPU, projections that are stored as [inputs, outputs] give the same results as projections that are
stored as [outputs, inputs]."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.model import weight_layout
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.weight_layout import rows_are_independent, with_weight_layout
from skyrl_tx_server.model.weights import load_params, param_shapes
from tests.fakes.tiny_model import CONFIG, make_model
from tests.server.test_executor import create, run, running, sample_op, snapshot, train
from tests.server.test_families import FAMILIES

FLOAT32 = np.dtype(np.float32)
BIG = replace(CONFIG, hidden_size=2048, intermediate_size=8192, num_layers=8)


def is_inputs_first(config: ModelConfig, dtype: np.dtype = FLOAT32) -> bool:
    return with_weight_layout(config, dtype=dtype, num_slots=8, max_lora_rank=4).inputs_first


@pytest.mark.parametrize("family", ["qwen3_sliding_window", "qwen3_moe", "qwen2", "llama3"])
def test_only_projections_are_transposed(family: str, tmp_path: Path) -> None:
    config = replace(load_model_config(FAMILIES / family), vocab_size=CONFIG.vocab_size)
    model_dir = make_model(tmp_path / "model", config)
    by_output, by_input = (
        load_params(model_dir, replace(config, inputs_first=inputs_first), FLOAT32)
        for inputs_first in (False, True)
    )
    for stack, before, after in zip(stacks_of(config), by_output.layers, by_input.layers, strict=True):
        for field, weight in stack.weights.items():
            expected = before[field].swapaxes(1, 2) if weight.is_projection else before[field]
            np.testing.assert_array_equal(after[field], expected)
    shapes = param_shapes(replace(config, inputs_first=True), FLOAT32)
    assert jax.tree.map(np.shape, by_input) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def test_inputs_first_needs_large_float32_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "rows_are_independent", lambda *_: True)
    assert (
        is_inputs_first(BIG)
        and not is_inputs_first(CONFIG)
        and not is_inputs_first(BIG, np.dtype(np.float16))
    )
    latent = load_model_config(FAMILIES / "deepseek_v3")
    monkeypatch.setattr(weight_layout, "MIN_BYTES", 0)
    assert is_inputs_first(CONFIG) and not is_inputs_first(latent)


def test_weights_are_outputs_first_if_results_depend_on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_layout, "rows_are_independent", lambda _, numbers: 64 not in numbers)
    assert not is_inputs_first(BIG)


def test_weights_are_outputs_first_if_factors_depend_on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = 4
    monkeypatch.setattr(
        weight_layout, "rows_are_independent", lambda shapes, _: all(rank not in shape for shape in shapes)
    )
    assert not is_inputs_first(BIG)


def test_products_that_depend_on_the_batch_size_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(64, 32), (32, 64)]
    assert rows_are_independent(shapes, (4, 4))
    einsum = jnp.einsum
    monkeypatch.setattr(jnp, "einsum", lambda form, x, weight: einsum(form, x, weight) + len(x))
    assert not rows_are_independent(shapes, (4, 5))


def test_both_layouts_give_the_same_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_model(tmp_path / "model")
    results = []
    for min_bytes in (weight_layout.MIN_BYTES, 0):
        monkeypatch.setattr(weight_layout, "MIN_BYTES", min_bytes)
        with running(model_dir, tmp_path / f"{min_bytes}", max_num_seqs=4, max_context_length=128) as engine:
            create(engine, "a")
            grad_norm = train(engine, "a")
            snapshot(engine, "a", "a")
            results.append((grad_norm, run(engine, sample_op("a", max_tokens=20)).sequences))
    (first_norm, first), (second_norm, second) = results
    assert first_norm == pytest.approx(second_norm, rel=1e-4)
    for by_output, by_input in zip(first, second, strict=True):
        np.testing.assert_array_equal(by_output.tokens, by_input.tokens)
        np.testing.assert_allclose(by_output.logprobs, by_input.logprobs, atol=1e-4)
