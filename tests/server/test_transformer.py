"""The transformer: logits, YaRN, adapters, gradients, attention and config.json."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.packed_attention import within_segments
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.lora.adapter import Adapter, init_adapter
from skyrl_tx_server.model.model_config import ModelConfig, YarnScaling, yarn_context
from skyrl_tx_server.model.transformer import (
    Params,
    Remat,
    by_layer,
    head_logits,
    hidden_states,
    init_params,
    unstack_layers,
)
from skyrl_tx_server.model.weights import load_params
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG, FIXTURES


def logits_of(config: ModelConfig, params, adapter: Adapter | None, tokens: np.ndarray) -> np.ndarray:
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    segments = np.ones_like(tokens)

    @jax.jit
    def run(params, adapter, tokens):
        return head_logits(
            config,
            params,
            adapter,
            hidden_states(config, params, adapter, tokens, positions, within_segments(segments)),
        )

    return np.asarray(run(params, adapter, tokens))


@pytest.mark.parametrize("name", ["tied", "untied", "multi_head", "yarn"])
def test_logits_equal_those_of_hugging_face(name: str) -> None:
    config = load_model_config(FIXTURES / name)
    expected = np.load(FIXTURES / name / "expected.npz")
    logits = logits_of(config, load_params(FIXTURES / name, config, "float32"), None, expected["tokens"])
    assert np.abs(logits[:, :: int(expected["stride"])] - expected["logits"]).max() <= 1e-4


def test_logits_differ_without_yarn() -> None:
    config = load_model_config(FIXTURES / "yarn")
    expected = np.load(FIXTURES / "yarn" / "expected.npz")
    plain = ModelConfig(
        **{**{name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}, "rope_scaling": None}
    )
    logits = logits_of(plain, load_params(FIXTURES / "yarn", plain, "float32"), None, expected["tokens"])
    assert np.abs(logits[:, :: int(expected["stride"])] - expected["logits"]).max() > 0.1


def test_yarn_extends_the_context_as_in_qwens_model_cards() -> None:
    plain = ModelConfig(
        **{
            **{name: getattr(CONFIG, name) for name in ModelConfig.__dataclass_fields__},
            "max_position_embeddings": 40_960,
        }
    )
    assert yarn_context(plain, 40_960) is plain
    extended = yarn_context(plain, 128_000)
    assert isinstance(extended.rope_scaling, YarnScaling)
    assert (extended.rope_scaling.factor, extended.rope_scaling.original_max_position_embeddings) == (
        4.0,
        32_768,
    )
    assert extended.rope_scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert extended.context_length == 131_072
    with pytest.raises(ConfigError, match="already has rope_scaling"):
        yarn_context(extended, 200_000)


@pytest.mark.parametrize(
    ("model_type", "own_length", "length", "factor", "original"),
    [
        ("qwen3_moe", 40_960, 131_072, 4.0, 32_768),
        ("qwen3", 32_768, 65_536, 2.0, 32_768),
        ("qwen3", 262_144, 300_000, 2.0, 262_144),
        ("qwen2", 131_072, 131_073, 2.0, 131_072),
        ("llama", 40_960, 40_961, 2.0, 40_960),
        ("llama", 8_192, 30_000, 4.0, 8_192),
    ],
)
def test_yarn_starts_from_the_training_length(
    model_type: str, own_length: int, length: int, factor: float, original: int
) -> None:
    plain = replace(CONFIG, model_type=model_type, max_position_embeddings=own_length)
    scaling = yarn_context(plain, length).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings) == (factor, original)


def test_a_new_adapter_does_not_change_logits() -> None:
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    new_adapter = init_adapter(CONFIG, tiny_qwen3.SPEC, tiny_qwen3.MAX_RANK)
    assert np.array_equal(
        logits_of(CONFIG, tiny_qwen3.params(), new_adapter, tokens),
        logits_of(CONFIG, tiny_qwen3.params(), None, tokens),
    )


def test_recomputation_does_not_change_the_gradient() -> None:
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)

    def loss(adapter: Adapter, params: Params, remat: Remat) -> jax.Array:
        hidden = hidden_states(
            CONFIG, params, adapter, tokens, tokens % 10, within_segments(np.ones_like(tokens)), remat=remat
        )
        return jnp.sum(jnp.sin(hidden))

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    kept, *recomputed = (
        jax.tree.leaves(gradient(tiny_qwen3.adapter(), tiny_qwen3.params(), remat)) for remat in Remat
    )
    for leaves in recomputed:
        for leaf, expected in zip(leaves, kept, strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def test_full_parameter_gradients_are_nonzero_without_adapter() -> None:
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)

    def loss(params) -> jax.Array:
        hidden = hidden_states(
            CONFIG, params, None, tokens, tokens % 10, within_segments(np.ones_like(tokens))
        )
        return jax.nn.log_softmax(head_logits(CONFIG, params, None, hidden))[..., 0].sum()

    assert all(
        np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(tiny_qwen3.params()))
    )


def write_config(tmp_path, **changes):
    raw = json.loads((FIXTURES / "tied" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if value is not None})
    )
    return tmp_path


def test_old_and_new_rope_keys_give_the_same_config(tmp_path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    old = load_model_config(write_config(tmp_path, rope_theta=5e5, rope_scaling={"type": "yarn", **yarn}))
    new = load_model_config(
        write_config(
            tmp_path, rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn}
        )
    )
    assert old == new
    assert isinstance(old.rope_scaling, YarnScaling)
    assert old.rope_scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert old.context_length == 256


def test_generation_config_overrides_the_stop_tokens(tmp_path) -> None:
    write_config(tmp_path, eos_token_id=3)
    assert load_model_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert load_model_config(tmp_path).eos_token_ids == (4, 3)


def test_null_in_generation_config_keeps_the_stop_tokens(tmp_path) -> None:
    write_config(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load_model_config(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma"},
            "model_type='gemma' is not supported; use one of deepseek_v3, llama, qwen2, qwen3, qwen3_moe",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "'sliding_window' is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ],
)
def test_the_error_for_an_unsupported_config_is_one_line(tmp_path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_model_config(write_config(tmp_path, **changes))
    assert "\n" not in str(error.value) and str(error.value).count(str(tmp_path)) == 1


def test_a_missing_model_directory_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model_config(tmp_path / "nothing")


def test_unstacked_layers_share_the_memory_of_the_stack() -> None:
    config = ModelConfig(
        **{**{name: getattr(CONFIG, name) for name in ModelConfig.__dataclass_fields__}, "num_layers": 3}
    )
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(0))
    unstacked = unstack_layers(config, params)
    for stacked_layer, layer in zip(by_layer(config, params), by_layer(config, unstacked), strict=True):
        jax.tree.map(np.testing.assert_array_equal, stacked_layer, layer)
    (stack,) = params.layers
    matrix = stack["gate_up"]
    starts = [
        layer["gate_up"].unsafe_buffer_pointer() - matrix.unsafe_buffer_pointer()
        for layer in unstacked.layers
    ]
    assert starts == [0, matrix.nbytes // 3, 2 * matrix.nbytes // 3]
