"""DeepSeek-V3 (R1, V3.1, Moonlight): latent attention, and dense layers before layers with groups of experts.

Heads attend in the latent space. `c` is the latent vector of a token. The key of a head is `W_k c`,
concatenated with a rotated key that all heads share. Since `q . W_k c = (W_k^T q) . c`, queries are
multiplied by `W_k^T`, and all heads attend to one key-value head: `c`, concatenated with the rotated key. The
value is the same vector. The part of the attention output that belongs to `c` is multiplied by `W_v`, and the
other part is not used. The cache stores this key-value head, once as key and once as value, instead of the
keys and values of every head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.experts import add_experts, expert_weights
from skyrl_tx_server.model.families.layer_spec import (
    Attend,
    Family,
    LayerParams,
    LoraTarget,
    ShardAxis,
    Weight,
    add_mlp,
    mlp_weights,
    module_of,
)
from skyrl_tx_server.model.layers import Rope, rms_norm, rotate
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraWeights, apply_lora, project
from skyrl_tx_server.model.mesh import shard_batch
from skyrl_tx_server.model.model_config import (
    ExpertGroups,
    Experts,
    LatentAttention,
    ModelConfig,
    YarnScaling,
    yarn_mscale,
)

logger = logging.getLogger(__name__)

LATENT_NORM_EPS = 1e-6  # for the norms within attention, where Hugging Face ignores rms_norm_eps


def attention_weights(config: ModelConfig) -> dict[str, Weight]:
    latent, hidden, heads = _latent(config), config.hidden_size, config.num_heads
    query_width, compressed_width = _widths(config)

    def matrix(*names: str, inputs: int, widths: tuple[int, ...], split: ShardAxis) -> Weight:
        return Weight(
            names=tuple(f"self_attn.{name}.weight" for name in names),
            inputs=inputs,
            widths=widths,
            switch=LoraTarget.ATTENTION,
            split=split,
        )

    def norm(name: str, width: int) -> Weight:
        return Weight(names=(f"{name}.weight",), widths=(width,))

    fields = {
        "attention_norm": norm("input_layernorm", hidden),
        "q_kv": matrix(
            "q_proj" if latent.q_lora_rank is None else "q_a_proj",
            "kv_a_proj_with_mqa",
            inputs=hidden,
            widths=(query_width, compressed_width),
            split=ShardAxis.OUTPUTS,
        ),
        "latent_norm": norm("self_attn.kv_a_layernorm", latent.kv_lora_rank),
        "kv_b": matrix(
            "kv_b_proj",
            inputs=latent.kv_lora_rank,
            widths=(heads * (latent.qk_nope_head_dim + latent.v_head_dim),),
            split=ShardAxis.INPUTS,
        ),
        "o": matrix("o_proj", inputs=heads * latent.v_head_dim, widths=(hidden,), split=ShardAxis.INPUTS),
    }
    if latent.q_lora_rank is not None:
        width = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        fields["query_norm"] = norm("self_attn.q_a_layernorm", latent.q_lora_rank)
        fields["q_b"] = matrix("q_b_proj", inputs=latent.q_lora_rank, widths=(width,), split=ShardAxis.INPUTS)
    return fields


def add_latent_attention[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    """Add latent attention to x [B, T, D]."""
    latent = _latent(config)
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    query, compressed = project(
        config, normed, params["q_kv"], _widths(config), module_of(adapter, "q_kv"), by="tensor"
    )
    if latent.q_lora_rank is not None:
        query = rms_norm(checkpoint_name(query, "qkv"), params["query_norm"], LATENT_NORM_EPS)
        (query,) = project(config, query, params["q_b"], params["q_b"].shape[:1], module_of(adapter, "q_b"))
    query = checkpoint_name(query, "qkv").reshape(*x.shape[:2], config.num_heads, -1)
    nope, roped = jnp.split(query, [latent.qk_nope_head_dim], axis=-1)
    vector, shared = jnp.split(checkpoint_name(compressed, "qkv")[:, :, None], [latent.kv_lora_rank], axis=-1)
    vector = rms_norm(vector, params["latent_norm"], LATENT_NORM_EPS)
    key = jnp.concatenate([vector, _rotate(latent, shared, rope)], axis=-1)
    latent_query = _queries_to_latent(config, nope, params, adapter)
    query = jnp.concatenate([latent_query, _rotate(latent, roped, rope)], axis=-1)
    attended, aux = attend(query * _score_scale(config), key, key)
    values = _values_from_latent(config, attended[..., : latent.kv_lora_rank], params, adapter)
    values = values.reshape(*x.shape[:2], -1)
    added = project(config, values, params["o"], (config.hidden_size,), module_of(adapter, "o"))[0]
    return checkpoint_name(shard_batch(config, x + added), "residual"), aux


def _queries_to_latent(
    config: ModelConfig, nope: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """Return queries [B, T, H, nope_dim] times `W_k^T` as [B, T, H, kv_lora_rank]. `W_k` is the key part of
    `kv_b`."""
    latent, module = _latent(config), module_of(adapter, "kv_b")
    out = jnp.einsum("bthk,hkc->bthc", nope, _kv_b_by_head(config, params)[:, : latent.qk_nope_head_dim])
    if module is None:
        return out

    def delta(weights: LoraWeights) -> tuple[jax.Array]:
        key_part = _by_head(config, weights.b[0])[..., : latent.qk_nope_head_dim].astype(nope.dtype)
        inner = jnp.einsum("bthk,rhk->bthr", nope, key_part)
        return (jnp.einsum("bthr,cr->bthc", inner * _scale(weights, nope), weights.a.astype(nope.dtype)),)

    return out + apply_lora(module, delta)[0]


def _values_from_latent(
    config: ModelConfig, attended: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """Return attention outputs [B, T, H, kv_lora_rank] times `W_v` as [B, T, H, value_dim]. `W_v` is the
    value part of `kv_b`."""
    latent, module = _latent(config), module_of(adapter, "kv_b")
    out = jnp.einsum("bthc,hvc->bthv", attended, _kv_b_by_head(config, params)[:, latent.qk_nope_head_dim :])
    if module is None:
        return out

    def delta(weights: LoraWeights) -> tuple[jax.Array]:
        inner = jnp.einsum("bthc,cr->bthr", attended, weights.a.astype(attended.dtype))
        inner = inner * _scale(weights, attended)
        value_part = _by_head(config, weights.b[0])[..., latent.qk_nope_head_dim :].astype(attended.dtype)
        return (jnp.einsum("bthr,rhv->bthv", inner, value_part),)

    return out + apply_lora(module, delta)[0]


def _kv_b_by_head(config: ModelConfig, params: LayerParams) -> jax.Array:
    """Return `kv_b` as [H, nope_dim + value_dim, kv_lora_rank]."""
    return params["kv_b"].reshape(config.num_heads, -1, _latent(config).kv_lora_rank)


def _by_head(config: ModelConfig, columns: ArrayLike) -> jax.Array:
    """Return `columns` [..., H * (nope_dim + value_dim)] as [..., H, nope_dim + value_dim]."""
    return jnp.reshape(columns, (*columns.shape[:-1], config.num_heads, -1))


def _scale(module: LoraWeights, like: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(module.scale)).astype(like.dtype)


def _rotate(latent: LatentAttention, x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate x [B, T, heads, rope_dim]. If pairs are interleaved, their first elements are moved to the first
    half, and their second elements to the second half. This does not change scores, because queries and keys
    are reordered in the same way."""
    if latent.interleaved:
        x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return rotate(x, rope)


def _score_scale(config: ModelConfig) -> float:
    """Return the factor by which the queries are multiplied before attention.

    `plain_attention` sets the scale of the scores to head_dim^-0.5, where head_dim is the width of the latent
    head. In Hugging Face, the scale is mscale^2 * (qk_nope_head_dim + qk_rope_head_dim)^-0.5. The factor is
    the second scale divided by the first.
    """
    latent, scaling = _latent(config), config.rope_scaling
    mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim) if isinstance(scaling, YarnScaling) else 1.0
    return mscale**2 * math.sqrt(config.head_dim / (latent.qk_nope_head_dim + latent.qk_rope_head_dim))


def _latent(config: ModelConfig) -> LatentAttention:
    assert config.latent is not None
    return config.latent


def _widths(config: ModelConfig) -> tuple[int, int]:
    """Return the two output widths of `q_kv`: the width of the queries (compressed if there is a
    `q_lora_rank`), and the width of the latent vector and the shared rotated key together."""
    latent = _latent(config)
    query = latent.q_lora_rank or config.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    return query, latent.kv_lora_rank + latent.qk_rope_head_dim


def weights(config: ModelConfig) -> dict[str, Weight]:
    return attention_weights(config) | expert_weights(config)


def first_weights(config: ModelConfig) -> dict[str, Weight]:
    assert config.experts is not None
    return attention_weights(config) | mlp_weights(config, width=config.experts.dense_width)


def add_experts_or_mlp(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    return (add_experts if "router" in params else add_mlp)(config, x, params, adapter)


def read(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    if config.num_kv_heads != config.num_heads:
        raise ConfigError(
            f"num_key_value_heads={config.num_kv_heads} must equal num_attention_heads={config.num_heads} in "
            "latent attention"
        )
    if num_predict_layers := raw.get("num_nextn_predict_layers"):
        logger.info("num_nextn_predict_layers=%s: multi-token prediction is not used", num_predict_layers)
    latent = LatentAttention(
        q_lora_rank=None if raw["q_lora_rank"] is None else int(raw["q_lora_rank"]),
        kv_lora_rank=int(raw["kv_lora_rank"]),
        qk_nope_head_dim=int(raw["qk_nope_head_dim"]),
        qk_rope_head_dim=int(raw["qk_rope_head_dim"]),
        v_head_dim=int(raw["v_head_dim"]),
        interleaved=bool(raw.get("rope_interleave", True)),
    )
    return replace(
        config,
        intermediate_size=int(raw["moe_intermediate_size"]),
        num_kv_heads=1,
        head_dim=latent.kv_lora_rank + latent.qk_rope_head_dim,
        latent=latent,
        experts=_read_experts(raw, config),
    )


def _read_experts(raw: Mapping[str, Any], config: ModelConfig) -> Experts:
    groups = ExpertGroups(
        count=int(raw["n_group"]), per_token=int(raw["topk_group"]), scale=float(raw["routed_scaling_factor"])
    )
    experts = Experts(
        count=int(raw["n_routed_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        normalized=bool(raw["norm_topk_prob"]),
        groups=groups,
        shared=int(raw["n_shared_experts"] or 0),
        dense_layers=int(raw["first_k_dense_replace"]),
        dense_width=config.intermediate_size,
    )
    size = experts.count // groups.count
    if (
        experts.count % groups.count
        or size < 2
        or not 1 <= groups.per_token <= groups.count
        or experts.per_token > groups.per_token * size
    ):
        raise ConfigError(
            f"n_routed_experts={experts.count}, n_group={groups.count}, topk_group={groups.per_token}, "
            f"num_experts_per_tok={experts.per_token}: n_group must divide n_routed_experts, each "
            "group must have at least 2 experts, topk_group must be from 1 to n_group, and topk_group groups "
            "together must have at least num_experts_per_tok experts"
        )
    if not 0 <= experts.dense_layers < config.num_layers:
        raise ConfigError(
            f"first_k_dense_replace={experts.dense_layers} must be at least 0 and less than "
            f"num_hidden_layers={config.num_layers}"
        )
    return experts


def write(config: ModelConfig) -> dict[str, Any]:
    latent, experts = _latent(config), config.experts
    assert experts is not None and experts.groups is not None
    return {
        "intermediate_size": experts.dense_width,
        "moe_intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_heads,
        "head_dim": latent.qk_rope_head_dim,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": latent.interleaved,
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalized,
        "n_group": experts.groups.count,
        "topk_group": experts.groups.per_token,
        "routed_scaling_factor": experts.groups.scale,
        "first_k_dense_replace": experts.dense_layers,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    weights=weights,
    first_weights=first_weights,
    attention_block=add_latent_attention,
    mlp_block=add_experts_or_mlp,
    expected={
        "attention_bias": False,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    read=read,
    write=write,
)
