"""A model as pure functions over stacked weights. Training, prefill and decoding share one layer function.

They differ in how a token attends, so `layer` takes attention as a callback. Weights have the dtype of the
checkpoint; norms, rotary angles, softmax and logits are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.families.layer_spec import STACK_INDEX, LayerParams, Stack
from skyrl_tx_server.model.families.table import family_of, stacks_of
from skyrl_tx_server.model.layers import Rope, rms_norm, rope_tables
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter
from skyrl_tx_server.model.lora.lora_math import ArrayLike, low_rank_deltas
from skyrl_tx_server.model.mesh import VOCABULARY, gathered, gathers, on_gpu, shard_batch
from skyrl_tx_server.model.model_config import ModelConfig, RopeSpec

COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""Compiler options of every program that runs a model. bfloat16 is rounded where the program says so, not
where a fusion happens to end, so that training and sampling, which fuse differently, agree
(scripts/check_bf16.py). On a GPU matrix products are cuBLAS's, which read a layer's weights where they lie in
their stack: for products that XLA makes itself it copies each layer out first, and a matrix beside an
adapter's to make one product of two (scripts/check_gpu.py)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """A whole model's weights."""

    embed: jax.Array  # [V, D]
    layers: tuple[LayerParams, ...]  # one for each of the family's stacks
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None when the embedding is the head


class Remat(StrEnum):
    """What the backward pass recomputes, in the order of less memory and more time."""

    NOTHING = "nothing"
    ACTIVATIONS = "activations"  # norms, rotary, silu and attention again; matmul results kept
    LAYERS = "layers"  # everything but each layer's input


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
    """Return random weights: norms are one, matrices normal with standard deviation 0.02. Call it inside
    jax.jit, because it consists of many small operations."""
    stacks = stacks_of(config)
    *keys, embed_key, head_key = jax.random.split(key, sum(len(stack.weights) for stack in stacks) + 2)
    remaining = iter(keys)

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def stacked(stack: Stack, field: str) -> jax.Array:
        key, weight = next(remaining), stack.weights[field]
        shape, kept = (len(stack.layers), *weight.shape), jnp.float32 if weight.exact else dtype
        if field.endswith("norm"):
            return jnp.ones(shape, kept)
        if not weight.inputs:
            return draw(key, shape, kept)
        return draw(key, (*shape[:-2], shape[-1], shape[-2]), kept).swapaxes(
            -1, -2
        )  # [in, out]: a seed keeps the model it always made

    vocabulary = (config.vocab_size, config.hidden_size)
    return Params(
        embed=draw(embed_key, vocabulary, dtype),
        layers=tuple({field: stacked(stack, field) for field in stack.weights} for stack in stacks),
        final_norm=jnp.ones(config.hidden_size, dtype),
        head=None if config.tie_word_embeddings else draw(head_key, vocabulary, dtype),
    )


type AttendAs[Aux] = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]]
"""`Attend` with the layer's attention as its first argument."""


def ropes_of(config: ModelConfig, positions: ArrayLike, dtype: jnp.dtype) -> dict[RopeSpec, Rope]:
    """Return the rotary tables for positions [B, T] of every embedding that the model's layers use."""
    specs = dict.fromkeys(stack.attention.rope for stack in stacks_of(config))
    return {spec: rope_tables(spec, positions, dtype) for spec in specs}


def layer[Aux](
    config: ModelConfig,
    stack: Stack,
    x: jax.Array,
    params: LayerParams,
    adapter: LayerAdapter | None,
    ropes: Mapping[RopeSpec, Rope],
    attend: AttendAs[Aux],
) -> tuple[jax.Array, Aux]:
    """One layer of `stack` over x [B, T, D]. `adapter` is its own: one for the batch, or one per row (leaves
    with a leading B axis)."""

    def attend_and_return(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Aux]:
        attended, aux = attend(stack.attention, q, k, v)
        return shard_batch(config, attended, features="tensor"), aux

    specs = {field: PartitionSpec(*weight.spec[1:]) for field, weight in stack.weights.items()}
    rope = ropes[stack.attention.rope]
    return family_of(config).layer(
        config, shard_batch(config, x), gathered(config, specs, params), adapter, rope, attend_and_return
    )


def cut_stack(config: ModelConfig, stack: LayerParams) -> tuple[LayerParams, LayerParams]:
    """A stack's weights in two, which `layer` takes together: those to be cut into layers, and those to be
    read where they lie. Matrices of experts are of the second kind, unless they must be gathered: a layer of
    them may be a gigabyte, of which a slice would be copied."""
    whole = {field: leaf for field, leaf in stack.items() if leaf.ndim == 4 and not gathers(config)}
    cut = {field: leaf for field, leaf in stack.items() if field not in whole}
    return cut | ({STACK_INDEX: jnp.arange(_depth(stack))} if whole else {}), whole


def by_layer(config: ModelConfig, params: Params) -> list[LayerParams]:
    """Return the weights of each layer."""
    layers = []
    for stack in params.layers:
        cut, whole = cut_stack(config, stack)
        for index in range(_depth(stack)):
            own = {field: jax.lax.index_in_dim(leaf, index, keepdims=False) for field, leaf in cut.items()}
            layers.append(own | whole)
    return layers


def reads_in_place(config: ModelConfig) -> bool:
    """Whether a program that runs `by_layer` reads each layer where it lies: on a GPU as said of
    `COMPILER_OPTIONS`, on a CPU `unstack_layers`."""
    return on_gpu() or (config.mesh is None and jax.default_backend() == "cpu")


def unstack_layers(config: ModelConfig, params: Params) -> Params:
    """The same weights with each layer in a stack of its own, on a CPU, where that costs no memory, for a
    program that runs `by_layer`: it would copy each out of its stack."""
    if config.mesh is not None or jax.default_backend() != "cpu":
        return params

    def one(leaf: jax.Array, index: int) -> jax.Array:
        return jax.device_put(np.asarray(leaf)[index : index + 1])

    layers = [
        jax.tree.map(partial(one, index=index), tree)
        for tree in params.layers
        for index in range(_depth(tree))
    ]
    return replace(params, layers=tuple(layers))


def _depth(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def hidden_states(
    config: ModelConfig,
    params: Params,
    adapter: Adapter | None,
    tokens_BT: ArrayLike,
    positions_BT: ArrayLike,
    attend: Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], jax.Array],
    *,
    remat: Remat = Remat.LAYERS,
) -> jax.Array:
    """Final-normed hidden states [B, T, D] of whole sequences; `attend`, as in `Attend`, says which tokens
    see which."""
    x = params.embed[tokens_BT]
    ropes = ropes_of(config, positions_BT, x.dtype)

    def body(
        stack: Stack, whole: LayerParams, x: jax.Array, weights: tuple[LayerParams, LayerAdapter | None]
    ) -> tuple[jax.Array, None]:
        own, adapter = weights
        return layer(config, stack, x, own | whole, adapter, ropes, lambda *heads: (attend(*heads), None))

    for index, stack in enumerate(stacks_of(config)):
        own, whole = cut_stack(config, params.layers[index])
        x, _ = jax.lax.scan(
            _remat(partial(body, stack, whole), remat), x, (own, adapter and adapter.layers[index])
        )
    return rms_norm(x, params.final_norm, config.rms_norm_eps)


def head_of(params: Params) -> jax.Array:
    """[V, D]"""
    return params.embed if params.head is None else params.head


def with_gathered_head(config: ModelConfig, params: Params) -> Params:
    """Gather the head once, for a program that multiplies it with many chunks."""
    if not gathers(config):
        return params
    return replace(params, **gathered(config, {"head": VOCABULARY}, {"head": head_of(params)}))


def head_logits(config: ModelConfig, params: Params, adapter: Adapter | None, hidden: jax.Array) -> jax.Array:
    """float32 logits [B, T, V] of hidden states [B, T, D]. The adapter is one for the batch or one per row,
    as in `layer`."""
    hidden = shard_batch(config, hidden)
    features = shard_batch(config, hidden, features=VOCABULARY[1]) if config.weight_stationary else hidden
    logits = _wide_logits(features, head_of(params))
    if adapter is None:
        return logits
    return logits + low_rank_deltas(hidden, adapter.head)[0].astype(jnp.float32)


@jax.custom_vjp
def _wide_logits(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """hidden [B, T, D] @ weight [V, D]ᵀ in float32. The gradient on `hidden` is a product in its own dtype,
    like every other layer's: in JAX's way the head would be converted to float32 for it, 1.5 GiB of
    Qwen3-4B's, and multiplied at half the speed or less."""
    return jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)


def _wide_logits_forward(
    hidden: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide_logits(hidden, weight), (hidden, weight)


def _wide_logits_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None]:
    hidden, weight = kept
    return jnp.einsum("btv,vd->btd", grad.astype(hidden.dtype), weight), None


_wide_logits.defvjp(_wide_logits_forward, _wide_logits_backward)


def _remat(body: Callable, remat: Remat) -> Callable:
    if remat is Remat.NOTHING:
        return body
    saved = () if remat is Remat.LAYERS else ("qkv", "attended", "residual", "gate_up")
    return jax.checkpoint(
        body, policy=jax.checkpoint_policies.save_only_these_names(*saved), prevent_cse=False
    )
