"""What a family of models is made of: its weights, described once, and its layer. Initialising, loading,
saving, adapting and sharding all follow the description; the blocks that most families share are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.layers import Rope, rms_norm
from skyrl_tx_server.model.lora.lora_math import LoraWeights, project
from skyrl_tx_server.model.mesh import Axes, shard_batch
from skyrl_tx_server.model.model_config import ModelConfig

type LayerParams = dict[str, jax.Array]
"""One layer's weights by field; stacked over layers every leaf has a leading L axis. Matrices of experts may
be those of all the stack's layers, [L, E, out, in]; then STACK_INDEX says which layer's are meant."""

STACK_INDEX = "stack_index"

type Attend[Aux] = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Aux]]
"""(q [B, T, H, hd], k [B, T, K, hd], v [B, T, K, hd]) -> (out [B, T, H, hd], aux); q and k already normed and
rotated."""


class LoraTarget(StrEnum):
    """Which of the contract's switches trains a projection's adapter."""

    ATTENTION = "train_attn"
    MLP = "train_mlp"
    UNEMBED = "train_unembed"


class ShardAxis(StrEnum):
    """Which side of a weight the mesh's `tensor` axis divides."""

    NEITHER = "neither"
    INPUTS = "inputs"
    OUTPUTS = "outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One field of a layer's weights: Hugging Face's tensors [out, in] one after the other along the outputs.

    Where `tensor` divides the outputs of several tensors, they are arranged so that each device's are a piece
    of every one: q0 k0 v0 | q1 k1 v1 instead of q0 q1 | k0 k1 | v0 v1.
    """

    names: tuple[str, ...]  # below `model.layers.N.`; with {expert} where each expert has its own
    widths: tuple[int, ...]  # outputs, one per name
    inputs: int = 0  # 0: a vector
    experts: int = 0  # 0: no expert axis, which else leads
    exact: bool = False  # float32, whatever the model's dtype
    switch: LoraTarget | None = None  # None: it has no adapter
    split: ShardAxis = ShardAxis.NEITHER

    @property
    def shape(self) -> tuple[int, ...]:
        lead = (self.experts,) if self.experts else ()
        return (*lead, sum(self.widths), *((self.inputs,) if self.inputs else ()))

    @property
    def spec(self) -> PartitionSpec:
        """How it lies on a mesh, stacked over layers. `fsdp` always divides outputs: each is then summed on
        one device, as if alone."""
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
    """Consecutive layers with the same weights and the same attention. Each field is stacked over them; one
    scan runs them."""

    layers: range
    weights: dict[str, Weight]
    attention: AttentionSpec


class Layer(Protocol):
    def __call__[Aux](
        self,
        config: ModelConfig,
        x: jax.Array,
        params: LayerParams,
        adapter: Mapping[str, LoraWeights] | None,
        rope: Rope,
        attend: Attend[Aux],
    ) -> tuple[jax.Array, Aux]:
        """One layer over x [B, T, D]. `adapter` is this layer's: one for the batch, or one per row (leaves
        with a leading B axis)."""
        ...


def plain_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """The attention that config.json describes; a layer has a sliding window if `config.sliding_windows` says
    so."""
    return AttentionSpec(
        scale=config.head_dim**-0.5,
        rope=config.rope,
        sliding_window=config.sliding_windows[layer] if config.sliding_windows else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Everything that sets one family apart. `expected` are config.json's entries that must have this value
    where they are present."""

    architecture: str  # Hugging Face's class
    weights: Callable[[ModelConfig], dict[str, Weight]]
    layer: Layer
    expected: Mapping[str, Any]
    attention: Callable[[ModelConfig, int], AttentionSpec] = plain_attention  # of the layer with this number
    default_head_dim: int | None = None  # None: hidden size / heads
    first_weights: Callable[[ModelConfig], dict[str, Weight]] | None = (
        None  # of the first layers, where `Experts.dense_layers` differ
    )
    read: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] = lambda raw, usual: (
        usual
    )  # what config.json says beyond the usual
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}  # the inverse of `read`


# --- blocks


def attention_weights(config: ModelConfig, *, heads: Mapping[str, Weight] | None = None) -> dict[str, Weight]:
    """`heads` is what a family does to the heads before it rotates them."""
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
        **(heads or {}),
        "o": Weight(
            names=("self_attn.o_proj.weight",),
            inputs=config.qkv_widths[0],
            widths=(hidden,),
            switch=LoraTarget.ATTENTION,
            split=ShardAxis.INPUTS,
        ),
    }


def mlp_weights(config: ModelConfig, *, width: int | None = None) -> dict[str, Weight]:
    """`width` is the perceptron's where it is not `intermediate_size`."""
    norm = Weight(names=("post_attention_layernorm.weight",), widths=(config.hidden_size,))
    return {
        "mlp_norm": norm,
        **mlp_layer_weights(config.hidden_size, width or config.intermediate_size, module="mlp"),
    }


def mlp_layer_weights(hidden: int, width: int, *, module: str, prefix: str = "") -> dict[str, Weight]:
    """Of Hugging Face's `module`; its fields begin with `prefix`."""
    gate, up, down = (f"{module}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        f"{prefix}gate_up": Weight(
            names=(gate, up),
            inputs=hidden,
            widths=(width, width),
            switch=LoraTarget.MLP,
            split=ShardAxis.OUTPUTS,
        ),
        f"{prefix}down": Weight(
            names=(down,), inputs=width, widths=(hidden,), switch=LoraTarget.MLP, split=ShardAxis.INPUTS
        ),
    }


def module_of(adapter: Mapping[str, LoraWeights] | None, field: str) -> LoraWeights | None:
    return None if adapter is None else adapter[field]


def qkv_proj(
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    *,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [B, T, heads, hd] of x [B, T, D], neither normed nor rotated."""
    normed = rms_norm(x, params["attention_norm"], config.rms_norm_eps)
    parts = project(
        config, normed, params["qkv"], config.qkv_widths, module_of(adapter, "qkv"), bias=bias, by="tensor"
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
    """x [B, T, D] plus what its rotated heads attend to."""
    attended, aux = attend(*heads)
    added = project(
        config,
        attended.reshape(*x.shape[:2], -1),
        params["o"],
        (config.hidden_size,),
        module_of(adapter, "o"),
    )[0]
    return checkpoint_name(shard_batch(config, x + added), "residual"), aux


def add_mlp(
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LoraWeights] | None
) -> jax.Array:
    """x [B, T, D] plus its gated perceptron."""
    return shard_batch(
        config, x + mlp(config, rms_norm(x, params["mlp_norm"], config.rms_norm_eps), params, adapter)
    )


def mlp(
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    *,
    prefix: str = "",
) -> jax.Array:
    """The gated perceptron of normed x [B, T, D] whose fields begin with `prefix`."""
    gate_up, down = f"{prefix}gate_up", f"{prefix}down"
    widths = (params[down].shape[1],) * 2
    parts = project(config, x, params[gate_up], widths, module_of(adapter, gate_up), by="tensor")
    gate, up = (checkpoint_name(part, "gate_up") for part in parts)
    return project(
        config, jax.nn.silu(gate) * up, params[down], (config.hidden_size,), module_of(adapter, down)
    )[0]
