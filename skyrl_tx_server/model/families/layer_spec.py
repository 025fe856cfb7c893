"""The description of a model family with its weights and its layer, and the attention and MLP blocks that
most families use.

Initialization, loading, saving, LoRA and sharding all use the description of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.kernels.paged_kernel import supports_head_dim
from skyrl_tx_server.model.kernels.rotary_kernel import normalize_and_rotate
from skyrl_tx_server.model.layers import Rope, rms_norm, rotate
from skyrl_tx_server.model.lora.lora_math import LoraWeights, project
from skyrl_tx_server.model.mesh import Axes, on_gpu, shard_batch
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig

type LayerParams = dict[str, jax.Array]
"""Maps each field to its weight. The weights belong to one layer or to a stack of L layers. In a stack, every
weight has a leading axis L. The weights of one layer may contain the matrices of the E experts of the whole
stack, [L, E, out, in]. In this case the entry STACK_INDEX is the index of the layer in the stack."""

STACK_INDEX = "stack_index"

type Attend[Aux] = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]]
"""(q [B, T, H, hd], k [B, T, K, hd], v [B, T, K, hd]) -> (out [B, T, H, hd], aux). q and k are already
rotated, and normalized if the family has norms for them. `aux` is a further value for the caller, for example
the changed KV cache."""


class LoraTarget(StrEnum):
    """The field of `LoraSpec` that determines whether the adapter of a projection is trained."""

    ATTENTION = "train_attn"
    MLP = "train_mlp"
    UNEMBED = "train_unembed"


class ShardAxis(StrEnum):
    """The axis of a weight that the `tensor` axis of the mesh divides."""

    NEITHER = "neither"
    INPUTS = "inputs"
    OUTPUTS = "outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One field of a layer's weights: one or several tensors [out, in] of Hugging Face, concatenated along
    the outputs.

    If the mesh axis `tensor` divides the outputs of a field with several tensors, the parts of the tensors
    are interleaved, so that each device has a part of every tensor: q0 k0 v0 | q1 k1 v1 instead of
    q0 q1 | k0 k1 | v0 v1.
    """

    names: tuple[str, ...]  # without `model.layers.N.`; {expert} stands for the number of the expert
    widths: tuple[int, ...]  # number of outputs, one per name
    inputs: int = 0  # number of inputs; 0: a vector
    experts: int = 0  # size of the leading expert axis; 0: no such axis
    exact: bool = False  # float32 in models of any dtype
    switch: LoraTarget | None = None  # the option that trains its adapter; None: no adapter
    split: ShardAxis = ShardAxis.NEITHER

    @property
    def shape(self) -> tuple[int, ...]:
        lead = (self.experts,) if self.experts else ()
        return (*lead, sum(self.widths), *((self.inputs,) if self.inputs else ()))

    @property
    def is_projection(self) -> bool:
        """Whether the field is a matrix with an adapter and without an axis of experts. Layers multiply by
        such a field in `project`, except `kv_b` of latent attention."""
        return self.inputs > 0 and self.experts == 0 and self.switch is not None

    def stored_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the shape on the device."""
        return self.shape[::-1] if config.inputs_first and self.is_projection else self.shape

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of the field, stacked over layers. If `split` is NEITHER, only the mesh axis `expert`
        divides the field. `fsdp` divides outputs and never inputs. If it divided inputs, each output would be
        a sum over several devices."""
        lead = (None, "expert") if self.experts else (None,)
        divided: dict[ShardAxis, tuple[Axes, Axes]] = {
            ShardAxis.INPUTS: ("fsdp", "tensor"),
            ShardAxis.OUTPUTS: (("tensor", "fsdp"), None),
            ShardAxis.NEITHER: (None, None),
        }
        outputs, inputs = divided[self.split]
        return PartitionSpec(*lead, outputs, inputs) if self.inputs else PartitionSpec(*lead, outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Consecutive layers with the same kinds of weights and the same attention settings. Each field is
    stacked over the layers. One scan runs the layers, except in unrolled decode programs, which contain every
    layer separately."""

    layers: range
    weights: dict[str, Weight]
    attention: AttentionSpec


class AttentionBlock(Protocol):
    def __call__[Aux](
        self,
        config: ModelConfig,
        x: jax.Array,
        params: LayerParams,
        adapter: Mapping[str, LoraWeights] | None,
        rope: Rope,
        attend: Attend[Aux],
    ) -> tuple[jax.Array, Aux]:
        """Return x [B, T, D] plus its attention, and the `aux` of `attend`. `adapter` contains the LoRA
        factors of the layer: the factors of one adapter for the whole batch, or the factors of all LoRA slots
        with the slot of each sequence. None: the base model."""
        ...


type MlpBlock = Callable[[ModelConfig, jax.Array, LayerParams, Mapping[str, LoraWeights] | None], jax.Array]
"""(config, x [B, T, D], weights of the layer, its adapter) -> x plus the output of the MLP."""


def plain_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Return the attention settings of layer number `layer`, as config.json describes them."""
    return AttentionSpec(
        scale=config.head_dim**-0.5,
        rope=config.rope,
        sliding_window=config.sliding_windows[layer] if config.sliding_windows else None,
    )


# --- blocks


def attention_weights(config: ModelConfig, *, more: Mapping[str, Weight] | None = None) -> dict[str, Weight]:
    """Return the descriptions of the weights that `add_self_attention` reads. `more` may contain `qkv_bias`,
    `q_norm` and `k_norm`."""
    hidden = config.hidden_size
    return {
        "attention_norm": Weight(names=("input_layernorm.weight",), widths=(hidden,)),
        "qkv": Weight(
            names=tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
            inputs=hidden,
            widths=config.qkv_widths,
            switch=LoraTarget.ATTENTION,
            split=ShardAxis.OUTPUTS,
        ),
        **(more or {}),
        "o": Weight(
            names=("self_attn.o_proj.weight",),
            inputs=config.qkv_widths[0],
            widths=(hidden,),
            switch=LoraTarget.ATTENTION,
            split=ShardAxis.INPUTS,
        ),
    }


def mlp_weights(config: ModelConfig, *, width: int | None = None) -> dict[str, Weight]:
    """Return the descriptions of the weights that `add_mlp` reads. `width=None` means `intermediate_size`."""
    norm = Weight(names=("post_attention_layernorm.weight",), widths=(config.hidden_size,))
    return {
        "mlp_norm": norm,
        **mlp_layer_weights(config.hidden_size, width or config.intermediate_size, module="mlp"),
    }


def mlp_layer_weights(
    hidden: int, width: int, *, module: str, prefix: str = "", experts: int = 0
) -> dict[str, Weight]:
    """Return the descriptions of the weights of an MLP or, with `experts`, of the MLPs of routed experts.
    `module` is their module in Hugging Face. The names of the fields begin with `prefix`."""
    gate, up, down = (f"{module}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        f"{prefix}gate_up": Weight(
            names=(gate, up),
            inputs=hidden,
            widths=(width, width),
            experts=experts,
            switch=LoraTarget.MLP,
            split=ShardAxis.OUTPUTS,
        ),
        f"{prefix}down": Weight(
            names=(down,),
            inputs=width,
            widths=(hidden,),
            experts=experts,
            switch=LoraTarget.MLP,
            split=ShardAxis.INPUTS,
        ),
    }


def module_of(adapter: Mapping[str, LoraWeights] | None, field: str) -> LoraWeights | None:
    return None if adapter is None else adapter[field]


def add_self_attention[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    """Add rotary self-attention to x [B, T, D]. Queries and keys are normalized if `params` has `q_norm`
    and `k_norm`."""

    def rotated(heads: jax.Array, norm: str) -> jax.Array:
        return rotate(rms_norm(heads, params[norm], config.rms_norm_eps) if norm in params else heads, rope)

    q, k, v = qkv_proj(config, x, params, adapter)
    if _rotates_by_kernel(config, x):
        heads = _rotated_by_kernel(config, (q, k, v), params, rope)
    else:
        heads = rotated(q, "q_norm"), rotated(k, "k_norm"), v
    return add_attention(config, x, params, adapter, heads, attend)


def _rotates_by_kernel(config: ModelConfig, x: jax.Array) -> bool:
    """Return whether x [B, T, D] are the tokens of a decode step on one GPU and the kernel supports the head
    dimension."""
    return on_gpu() and config.mesh is None and x.shape[1] == 1 and supports_head_dim(config.head_dim)


def _rotated_by_kernel(
    config: ModelConfig, heads: tuple[jax.Array, jax.Array, jax.Array], params: LayerParams, rope: Rope
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # XLA removes this concatenation, because the heads are slices of one projection.
    parts = [part.reshape(*part.shape[:2], -1) for part in heads]
    fused = jnp.concatenate(parts, axis=-1).reshape(len(parts[0]), -1, config.head_dim)
    norms = (params["q_norm"], params["k_norm"]) if "q_norm" in params else None
    cos, sin = rope.cos[:, 0], rope.sin[:, 0]
    widths = config.num_heads, config.num_kv_heads
    q, k, v = normalize_and_rotate(fused, widths, norms, cos, sin, eps=config.rms_norm_eps)
    return q[:, None], k[:, None], v[:, None]


def qkv_proj(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [B, T, heads, hd] of x [B, T, D], neither normalized nor rotated."""
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    parts = project(
        config,
        normed,
        params["qkv"],
        config.qkv_widths,
        module_of(adapter, "qkv"),
        bias=params.get("qkv_bias"),
        by="tensor",
    )
    q, k, v = (checkpoint_name(part, "qkv").reshape(*x.shape[:2], -1, config.head_dim) for part in parts)
    return q, k, v


def add_attention[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    """Compute attention with the rotated heads (q, k, v), project it by `o`, and add it to x [B, T, D]."""
    attended, aux = attend(*heads)
    attended = attended.reshape(*x.shape[:2], -1)
    (added,) = project(config, attended, params["o"], (config.hidden_size,), module_of(adapter, "o"))
    return checkpoint_name(shard_batch(config, x + added), "residual"), aux


def add_mlp(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """Add the gated MLP to x [B, T, D]."""
    normed = rms_norm(x, params["mlp_norm"], config.rms_norm_eps)
    return shard_batch(config, x + mlp(config, normed, params, adapter))


def mlp(
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    *,
    prefix: str = "",
) -> jax.Array:
    """Return the output of the gated MLP for normalized x [B, T, D]. The names of its fields in `params` and
    `adapter` begin with `prefix`."""
    gate_up, down = f"{prefix}gate_up", f"{prefix}down"
    widths = (params[down].shape[0 if config.inputs_first else 1],) * 2
    parts = project(config, x, params[gate_up], widths, module_of(adapter, gate_up), by="tensor")
    gate, up = (checkpoint_name(part, "gate_up") for part in parts)
    return project(
        config, jax.nn.silu(gate) * up, params[down], (config.hidden_size,), module_of(adapter, down)
    )[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    architecture: str  # the name of the class in Hugging Face
    weights: Callable[[ModelConfig], dict[str, Weight]]
    attention_block: AttentionBlock = add_self_attention
    mlp_block: MlpBlock = add_mlp
    expected: Mapping[str, Any]  # required values of config.json; an entry may also be absent or null
    attention: Callable[[ModelConfig, int], AttentionSpec] = plain_attention  # (config, layer number) -> spec
    default_head_dim: int | None = None  # used if config.json has no head_dim; None: hidden size / heads
    first_weights: Callable[[ModelConfig], dict[str, Weight]] | None = None
    """The weights of the first `Experts.dense_layers` layers. None: the family has no such layers."""
    read: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] = lambda raw, config: config
    """(config.json, configuration with the entries that all families share) -> configuration that also has
    the entries of this family."""
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}  # the inverse of `read`
