"""A model as pure functions over stacked weights.

Training, prefill and decoding share `layer`, which takes attention as a callback. Activations and weights
have the dtype of the option `dtype`, except that weights with `Weight.exact` are float32. Norms, rotary
angles, softmax and logits are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.families.layer_spec import STACK_INDEX, LayerParams, Stack
from skyrl_tx_server.model.families.table import family_of, stacks_of
from skyrl_tx_server.model.layers import Rope, rms_norm, rope_tables
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter
from skyrl_tx_server.model.lora.lora_math import (
    ArrayLike,
    decode_delta,
    low_rank_deltas,
    uses_decode_kernel,
)
from skyrl_tx_server.model.mesh import VOCABULARY, gathered, gathers, on_gpu, shard_batch
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig, RopeSpec

COMPILER_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""Compiler options of all programs that run a model. With the first option, values are rounded to bfloat16
after every operation, not only at the ends of fusions, so training and sampling agree although XLA fuses
their operations differently (scripts/check_bf16.py). The weights of equal layers are stacked in one array.
With the second option, cuBLAS computes matrix products on a GPU and reads the weights of a layer in place in
this array. XLA's Triton products would first copy each layer out of the array. The third option turns off
XLA's dot merger, which would copy a matrix and an adapter into one matrix, to compute both products at once
(scripts/check_gpu.py)."""

SAMPLING_OPTIONS = COMPILER_OPTIONS | {"xla_disable_hlo_passes": "rematerialization"}
"""Compiler options of the programs that use the KV cache. If a kernel writes the cache in place, XLA counts
the cache's memory twice. With a cache larger than about half of a GPU's memory, XLA would therefore recompute
small operations to save memory."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    embed: jax.Array  # [V, D]
    layers: tuple[LayerParams, ...]  # one per stack of consecutive equal layers
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None: the embedding is the head


class Remat(StrEnum):
    """The values that the backward pass recomputes. Each option takes less memory and more time than the
    previous option."""

    NOTHING = "nothing"
    # Recomputes norms, rotary embeddings, silu, products with LoRA's A, products with `kv_b` (the weight that
    # expands the latent vectors of MLA) and routed experts. Keeps the outputs of attention and of the other
    # projections.
    ACTIVATIONS = "activations"
    LAYERS = "layers"  # recomputes everything except the input of each layer


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
    """Return random weights: ones for norms, normal values with standard deviation 0.02 for all others. Call
    this function inside jax.jit, because it consists of many small operations."""
    stacks = stacks_of(config)
    *keys, embed_key, head_key = jax.random.split(key, sum(len(stack.weights) for stack in stacks) + 2)
    remaining = iter(keys)

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def stacked(stack: Stack, field: str) -> jax.Array:
        key, weight = next(remaining), stack.weights[field]
        shape, leaf_dtype = (len(stack.layers), *weight.shape), jnp.float32 if weight.exact else dtype
        if field.endswith("norm"):
            return jnp.ones(shape, leaf_dtype)
        if not weight.inputs:
            return draw(key, shape, leaf_dtype)
        # Matrices are drawn as [in, out] and then transposed. Do not draw them as [out, in]. This would
        # change the models that scripts and tests create from fixed seeds.
        return draw(key, (*shape[:-2], shape[-1], shape[-2]), leaf_dtype).swapaxes(-1, -2)

    vocabulary = (config.vocab_size, config.hidden_size)
    return Params(
        embed=draw(embed_key, vocabulary, dtype),
        layers=tuple({field: stacked(stack, field) for field in stack.weights} for stack in stacks),
        final_norm=jnp.ones(config.hidden_size, dtype),
        head=None if config.tie_word_embeddings else draw(head_key, vocabulary, dtype),
    )


type AttendAs[Aux] = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]]
"""`layer_spec.Attend` with an additional first argument, the AttentionSpec of the layer."""


def ropes_of(config: ModelConfig, positions: ArrayLike, dtype: jnp.dtype) -> dict[RopeSpec, Rope]:
    """Return the rotary tables of positions [B, T] for each rotary embedding of the model."""
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
    """Return x [B, T, D] after one layer of `stack`, and the second result of `attend`. `adapter` holds
    the layer's LoRA matrices: one adapter for all sequences, or all LoRA slots and the slot index of each
    sequence. None: the base model."""

    def attend_and_return(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Aux]:
        attended, aux = attend(stack.attention, q, k, v)
        return shard_batch(config, attended, features="tensor"), aux

    specs = {field: PartitionSpec(*weight.spec[1:]) for field, weight in stack.weights.items()}
    x, params = shard_batch(config, x), gathered(config, specs, params)
    family, rope = family_of(config), ropes[stack.attention.rope]
    x, aux = family.attention_block(config, x, params, adapter, rope, attend_and_return)
    return family.mlp_block(config, x, params, adapter), aux


def split_stack(config: ModelConfig, stack: LayerParams) -> tuple[LayerParams, LayerParams]:
    """Split the weights of a stack into (weights to slice by layer, weights to pass whole). `layer` needs
    both.

    The matrices of experts are passed whole, because XLA would copy the slice of each layer (up to a
    gigabyte). In programs that gather each layer's matrices along `fsdp` (see `gathers`), they are sliced,
    because only one layer is gathered at a time.
    """
    whole = {field: leaf for field, leaf in stack.items() if leaf.ndim == 4 and not gathers(config)}
    sliced = {field: leaf for field, leaf in stack.items() if field not in whole}
    return sliced | ({STACK_INDEX: jnp.arange(_num_layers(stack))} if whole else {}), whole


def by_layer(config: ModelConfig, params: Params) -> list[LayerParams]:
    """Return the weights of each layer."""
    layers = []
    for stack in params.layers:
        sliced, whole = split_stack(config, stack)
        for index in range(_num_layers(stack)):
            parts = {
                field: jax.lax.index_in_dim(leaf, index, keepdims=False) for field, leaf in sliced.items()
            }
            layers.append(parts | whole)
    return layers


def reads_in_place(config: ModelConfig) -> bool:
    """Return whether a program that uses `by_layer` reads the weights of each layer in place: on a GPU
    because of `COMPILER_OPTIONS`, on a CPU because of `unstack_layers`."""
    return on_gpu() or (config.mesh is None and jax.default_backend() == "cpu")


def unstack_layers(config: ModelConfig, params: Params) -> Params:
    """On one CPU device, return the weights with one stack per layer, so that a program that uses `by_layer`
    does not copy layers out of their stacks. The new stacks share memory with the old stacks. On a GPU
    or a mesh, return `params`."""
    if config.mesh is not None or jax.default_backend() != "cpu":
        return params

    def slice_layer(leaf: jax.Array, index: int) -> jax.Array:
        return jax.device_put(np.asarray(leaf)[index : index + 1])

    layers = [
        jax.tree.map(partial(slice_layer, index=index), stack)
        for stack in params.layers
        for index in range(_num_layers(stack))
    ]
    return replace(params, layers=tuple(layers))


def _num_layers(stack: LayerParams) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


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
    """Return the hidden states [B, T, D] of whole sequences after the final norm. `adapter` is one adapter
    for the batch. None: the base model. `attend` is an `AttendAs` that returns only the attention output."""
    x = params.embed[tokens_BT]
    ropes = ropes_of(config, positions_BT, x.dtype)

    def body(
        stack: Stack, whole: LayerParams, x: jax.Array, weights: tuple[LayerParams, LayerAdapter | None]
    ) -> tuple[jax.Array, None]:
        sliced, adapter = weights
        return layer(config, stack, x, sliced | whole, adapter, ropes, lambda *heads: (attend(*heads), None))

    for index, stack in enumerate(stacks_of(config)):
        sliced, whole = split_stack(config, params.layers[index])
        weights = sliced, adapter and adapter.layers[index]
        x, _ = jax.lax.scan(_remat(partial(body, stack, whole), remat), x, weights)
    return rms_norm(x, params.final_norm, config.rms_norm_eps)


def head_of(params: Params) -> jax.Array:
    """Return the output head [V, D]."""
    return params.embed if params.head is None else params.head


def with_gathered_head(config: ModelConfig, params: Params) -> Params:
    """Return the weights with the head gathered along `fsdp`. Call it inside a compiled program that computes
    several chunks of logits, so that the program gathers the head only once."""
    if not gathers(config):
        return params
    return replace(params, **gathered(config, {"head": VOCABULARY}, {"head": head_of(params)}))


def head_logits(config: ModelConfig, params: Params, adapter: Adapter | None, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [B, T, V] of hidden states [B, T, D]. `adapter.head` holds one adapter for all
    sequences, or all LoRA slots and the slot index of each sequence. `adapter` is None for the base model."""
    hidden = shard_batch(config, hidden)
    features = shard_batch(config, hidden, features=VOCABULARY[1]) if config.weight_stationary else hidden
    logits = _wide_logits(features, head_of(params))
    if adapter is None:
        return logits
    if uses_decode_kernel(config, hidden, adapter.head):
        return logits + decode_delta(hidden, adapter.head).astype(jnp.float32)
    deltas = low_rank_deltas(hidden, adapter.head, inputs_first=config.inputs_first)
    return logits + deltas[0].astype(jnp.float32)


@jax.custom_vjp
def _wide_logits(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Return hidden [B, T, D] @ weight [V, D]ᵀ in float32. The gradient of `hidden` is computed in its dtype,
    as in every other layer. JAX's default gradient would convert the head to float32, 1.5 GiB for Qwen3-4B,
    and take at least twice as long. `weight` has no gradient."""
    return jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)


def _wide_logits_forward(
    hidden: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide_logits(hidden, weight), (hidden, weight)


def _wide_logits_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None]:
    hidden, weight = kept
    return jnp.einsum("btv,vd->btd", grad.astype(hidden.dtype), weight), None


_wide_logits.defvjp(_wide_logits_forward, _wide_logits_backward)


def _remat(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat is Remat.NOTHING:
        return body
    saved = () if remat is Remat.LAYERS else ("qkv", "attended", "residual", "gate_up")
    return jax.checkpoint(
        body, policy=jax.checkpoint_policies.save_only_these_names(*saved), prevent_cse=False
    )
