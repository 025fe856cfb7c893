"""All model families give the logits of Hugging Face transformers, and run in the executor."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts.packed_attention import within_segments
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    LoraSpec,
    LossFn,
    OptimStep,
    Sample,
    SampleResult,
    SamplingSettings,
    SaveSampler,
    SaveWeights,
    TrainDatum,
)
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.files.base_model import fingerprint
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.model.config_json import config_json, load_model_config
from skyrl_tx_server.model.families.table import FAMILIES as TABLE
from skyrl_tx_server.model.lora.adapter import Adapter, init_adapter, zero_adapter
from skyrl_tx_server.model.model_config import Llama3Scaling, ModelConfig, YarnScaling, yarn_context
from skyrl_tx_server.model.transformer import Params, head_logits, hidden_states
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params, save_model
from tests.fakes.present import present
from tests.fakes.tiny_model import make_settings
from tests.server.test_executor import TIMEOUT_S
from tests.server.tiny_qwen3 import FIXTURES as QWEN3

FAMILIES = QWEN3.parent / "families"
NAMES = [
    "qwen2",
    "llama",
    "llama3",
    "qwen3_moe",
    "qwen3_moe_unnormalized",
    "deepseek_v3",
    "deepseek_v3_plain",
    "qwen3_sliding_window",
]


def logits_of(
    config: ModelConfig, params: Params, tokens: np.ndarray, adapter: Adapter | None = None
) -> np.ndarray:
    return np.asarray(_logits_of(config, params, tokens, adapter))


@partial(jax.jit, static_argnums=0)
def _logits_of(config: ModelConfig, params: Params, tokens: jax.Array, adapter: Adapter | None) -> jax.Array:
    positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
    attend = within_segments(jax.numpy.ones_like(tokens))
    return head_logits(
        config, params, adapter, hidden_states(config, params, adapter, tokens, positions, attend)
    )


def difference(config: ModelConfig, name: str, params: Params | None = None) -> float:
    """Return the largest difference from Hugging Face's logits. `params` replaces the fixture's weights."""
    expected = np.load(FAMILIES / name / "expected.npz")
    logits = logits_of(config, params or load_params(FAMILIES / name, config, "float32"), expected["tokens"])
    return float(np.abs(logits[:, :: int(expected["stride"])] - expected["logits"]).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.seed_behaviour(122)
def test_logits_equal_those_of_hugging_face(name: str) -> None:
    assert difference(load_model_config(FAMILIES / name), name) <= 1e-4


def test_the_llama3_fixture_detects_missing_rope_scaling() -> None:
    config = load_model_config(FAMILIES / "llama3")
    assert isinstance(config.rope_scaling, Llama3Scaling)
    unscaled = ModelConfig(
        **{**{name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}, "rope_scaling": None}
    )
    assert difference(unscaled, "llama3") > 0.1


@pytest.mark.parametrize("feature", ["score scale", "groups", "bias", "expert scale", "interleaved pairs"])
def test_the_deepseek_fixture_detects_each_missing_feature(feature: str) -> None:
    config = load_model_config(FAMILIES / "deepseek_v3")
    params = load_params(FAMILIES / "deepseek_v3", config, "float32")
    latent, scaling = present(config.latent), config.rope_scaling
    assert config.experts is not None and config.experts.groups is not None
    assert isinstance(scaling, YarnScaling)
    groups = {"groups": {"per_token": 4}, "expert scale": {"scale": 1.0}}.get(feature, {})
    config = replace(config, experts=replace(config.experts, groups=replace(config.experts.groups, **groups)))
    if feature == "score scale":
        config = replace(config, rope_scaling=replace(scaling, mscale_all_dim=0.0))
    if feature == "interleaved pairs":
        config = replace(config, latent=replace(latent, interleaved=False))
    if feature == "bias":
        params = replace(
            params,
            layers=tuple(
                stack | {"router_bias": 0 * stack["router_bias"]} if "router" in stack else stack
                for stack in params.layers
            ),
        )
    assert difference(config, "deepseek_v3", params) > 0.01


def test_every_family_in_the_table_has_a_fixture() -> None:
    assert {load_model_config(FAMILIES / name).model_type for name in NAMES} | {"qwen3"} == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_read_back_unchanged(tmp_path: Path, name: str) -> None:
    config = load_model_config(FAMILIES / name)
    params = load_params(FAMILIES / name, config, "float32")
    save_model(params, config, tmp_path)
    assert load_model_config(tmp_path) == config
    saved = load_params(tmp_path, config, "float32")
    for left, right in zip(jax.tree.leaves(saved), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.fixture
def moe_engine(tmp_path: Path) -> Iterator[Engine]:
    settings = make_settings(
        FAMILIES / "qwen3_moe", tmp_path, max_context_length=64, train_tokens_per_batch=128, max_num_seqs=4
    )
    engine = Engine(DeviceExecutor(settings))
    engine.start()
    yield engine
    engine.stop()


@pytest.mark.seed_behaviour(109)
def test_sampling_and_training_an_moe_agree_for_each_adapter(moe_engine: Engine) -> None:
    random = np.random.default_rng(0)

    def run(op):
        return moe_engine.submit(op).result(TIMEOUT_S)

    weights = {"untrained": None, "one": "memory://one", "two": "memory://two"}
    for seed, (model_id, snapshot) in enumerate(weights.items()):
        run(CreateModel(model_id=model_id, lora=LoraSpec(rank=4, seed=seed)))
        if snapshot is not None:
            tokens = random.integers(0, 101, 40).astype(np.int32)
            datum = TrainDatum(tokens=tokens[:-1], target_tokens=tokens[1:])
            run(ForwardBackward(model_id=model_id, data=(datum,), loss_fn=LossFn.CROSS_ENTROPY))
            assert (
                run(OptimStep(model_id=model_id, adam=AdamSettings(learning_rate=3e-3))).metrics["grad_norm"]
                > 0
            )
            run(SaveSampler(model_id=model_id, weights=snapshot))
    prompt = random.integers(0, 101, 50).astype(np.int32)
    settings = SamplingSettings(max_tokens=12, seed=5, stop_at_eos=False)
    samples = {
        model_id: moe_engine.submit(Sample(prompt=prompt, weights=snapshot, num_samples=1, settings=settings))
        for model_id, snapshot in weights.items()
    }
    logprobs = {}
    for model_id, future in samples.items():
        for sequence in future.result(TIMEOUT_S).sequences:
            text = np.concatenate([prompt, sequence.tokens])
            datum = TrainDatum(tokens=text[:-1], target_tokens=text[1:])
            scored = run(
                ForwardBackward(
                    model_id=model_id, data=(datum,), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True
                )
            )
            assert np.abs(scored.logprobs[0][len(prompt) - 1 :] - sequence.logprobs).max() <= 1e-4
            logprobs[model_id] = sequence.logprobs
    assert not np.allclose(logprobs["untrained"], logprobs["one"], atol=1e-2)
    path = present(run(SaveWeights(model_id="one", name="state")).path)
    run(LoadWeights(model_id="copy", path=path, create=True, optimizer=True))
    assert run(SaveWeights(model_id="copy", name="state")).size_bytes > 0


def random_adapter(config: ModelConfig, spec: LoraSpec) -> dict[str, np.ndarray]:
    """Return the arrays of an adapter as in a checkpoint, with random values."""
    random = np.random.default_rng(spec.seed)
    arrays = adapter_to_arrays(init_adapter(config, spec, spec.rank), config, spec)
    return {name: random.normal(0, 0.05, array.shape).astype(np.float32) for name, array in arrays.items()}


def test_latent_attention_logprobs_equal_the_forward_pass(tmp_path: Path) -> None:
    """Two adapters and the base model sample in one batch. A second turn has a partly cached prompt."""
    directory, spec = FAMILIES / "deepseek_v3", LoraSpec(rank=8)
    config = load_model_config(directory)
    params, store = (
        load_params(directory, config, "float32"),
        CheckpointStore(tmp_path, "local/tiny", fingerprint(directory)),
    )
    adapters: dict[str | None, Adapter] = {None: zero_adapter(config, spec.rank)}
    for seed, name in enumerate(("one", "two")):
        arrays = random_adapter(config, replace(spec, seed=seed))
        info = store.write(
            f"tinker://run/sampler_weights/{name}", arrays, lora=spec, step=0, user_metadata={}
        )
        adapters[info.path] = adapter_from_arrays(arrays, config, spec, spec.rank)
    engine = Engine(
        DeviceExecutor(make_settings(directory, tmp_path, max_context_length=256, max_num_seqs=3))
    )
    engine.start()

    def sample(weights: str | None, prompt: np.ndarray, max_tokens: int) -> Future:
        settings = SamplingSettings(max_tokens=max_tokens, seed=5, stop_at_eos=False)
        return engine.submit(Sample(prompt=prompt, weights=weights, num_samples=1, settings=settings))

    def check_logprobs(weights: str | None, prompt: np.ndarray, result: SampleResult) -> np.ndarray:
        """Compare the logprobs of a sample with the forward pass, and return its tokens."""
        (sequence,) = result.sequences
        text = np.concatenate([prompt, sequence.tokens])
        logits = logits_of(config, params, np.pad(text, (0, 160 - len(text)))[None], adapters[weights])[
            0, len(prompt) - 1 : len(text) - 1
        ]
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(sequence.tokens)), sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, logprobs, atol=1e-4)
        return sequence.tokens

    prompt = np.random.default_rng(0).integers(0, 101, 130).astype(np.int32)
    futures = {weights: sample(weights, prompt, 12) for weights in adapters}
    tokens = {
        weights: check_logprobs(weights, prompt, future.result(TIMEOUT_S))
        for weights, future in futures.items()
    }
    assert len({tuple(sequence_tokens) for sequence_tokens in tokens.values()}) == 3
    last = list(tokens)[-1]
    second_prompt = np.concatenate([prompt, tokens[last]])
    second_turn = sample(last, second_prompt, 2).result(TIMEOUT_S)
    check_logprobs(last, second_prompt, second_turn)
    assert second_turn.prompt_cache_hit_tokens >= len(prompt)
    engine.stop()


def write_config(directory: Path, name: str, **changes) -> Path:
    raw = json.loads((FAMILIES / name / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if value is not None})
    )
    return directory


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("llama3", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "'low_freq_factor' is missing",
        ),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor=4.0 and high_freq_factor=4.0; high_freq_factor must be larger",
        ),
        (
            "llama3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            "rope_parameters per layer type are not supported",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 0.0}, "rope_parameters": None},
            "factor=0.0; it must be a number of",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling has rope_type='yarn' and rope_parameters has 'default'; keep one value",
        ),
        ("llama", {"rope_scaling": [1]}, "not a mapping"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok=9 must be between 1 and the number of experts, 6",
        ),
        ("qwen3_moe", {"num_local_experts": None}, "'num_experts' is missing"),
        (
            "qwen2",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized weights .*fp8.*convert them to bfloat16",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must equal num_attention_heads=4"),
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts=8, n_group=3, topk_group=2"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "n_group=4, topk_group=2, num_experts_per_tok=5"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace=2 must be at least 0 and less than num_hidden_layers=2",
        ),
        ("deepseek_v3", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("deepseek_v3", {"n_group": 0}, "n_group=0 must be at least 1"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ("llama", {"num_key_value_heads": -4}, "num_key_value_heads=-4 must be at least 1"),
        ("llama", {"vocab_size": math.inf}, "cannot convert float infinity"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
        ("llama", {"eos_token_id": [2, None]}, r"eos_token_id=\[2, None\] of config.json or"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ("qwen3_moe", {"residual_multiplier": 0.2}, "residual_multiplier=0.2 is not supported"),
        ("deepseek_v3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("qwen2", {"is_causal": False}, "is_causal=False is not supported"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window must be false"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types must be 'full_attention'"),
        ("llama", {"model_type": []}, r"model_type=\[\] is not supported"),
    ],
)
@pytest.mark.seed_behaviour(122)
def test_the_error_for_an_unsupported_config_is_one_line(
    tmp_path: Path, name: str, changes: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_model_config(write_config(tmp_path, name, **changes))
    assert "\n" not in str(error.value)


def test_an_original_length_outside_the_rope_entry_is_used(tmp_path: Path) -> None:
    """transformers prefers the entry at the top level of config.json to the same entry in rope_parameters."""
    config = load_model_config(write_config(tmp_path, "llama3", original_max_position_embeddings=48))
    assert isinstance(config.rope_scaling, Llama3Scaling)
    assert config.rope_scaling.original_max_position_embeddings == 48


def test_qwen3_moe_has_the_default_head_dim_of_transformers(tmp_path: Path) -> None:
    raw = json.loads((FAMILIES / "qwen3_moe" / "config.json").read_text())
    config = load_model_config(write_config(tmp_path, "qwen3_moe", head_dim=None))
    assert config.head_dim == raw["hidden_size"] // raw["num_attention_heads"]


@pytest.mark.seed_behaviour(136)
def test_the_config_of_deepseeks_checkpoints_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek's config has the rotary settings of transformers 4, and layers for multi-token prediction."""
    config = load_model_config(FAMILIES / "deepseek_v3")
    scaling = {
        "type": "yarn",
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 64,
    }
    changes = {
        "rope_parameters": None,
        "rope_theta": 10000,
        "rope_scaling": scaling,
        "rope_interleave": None,
        "head_dim": None,
    }
    with caplog.at_level("INFO"):
        assert (
            load_model_config(write_config(tmp_path, "deepseek_v3", **changes, num_nextn_predict_layers=1))
            == config
        )
    assert "num_nextn_predict_layers=1: multi-token prediction is not used" in caplog.text
    with pytest.raises(ConfigError, match="yarn=true does not support deepseek_v3"):
        yarn_context(load_model_config(FAMILIES / "deepseek_v3_plain"), 512)


def test_a_routers_bias_stays_in_float32() -> None:
    config = load_model_config(FAMILIES / "deepseek_v3")
    _, mixtures = load_params(FAMILIES / "deepseek_v3", config, "bfloat16").layers
    assert {field for field, leaf in mixtures.items() if leaf.dtype == np.float32} == {"router_bias"}


def test_moe_configs_of_transformers_4_and_5_are_read(tmp_path: Path) -> None:
    config = load_model_config(FAMILIES / "qwen3_moe")
    assert config.experts is not None and config.experts.count == 6
    assert (
        load_model_config(write_config(tmp_path, "qwen3_moe", num_local_experts=None, num_experts=6))
        == config
    )
    assert config_json(config, "float32")["num_experts"] == 6
