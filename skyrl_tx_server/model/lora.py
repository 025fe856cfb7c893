"""LoRA adapters as a pytree whose shape depends only on the model and the server's maximum rank, so that no adapter compiles anything.

A fused projection (q|k|v, gate|up) keeps one A with its parts' columns side by side and one B per part, each part padded to
`max_rank`. Padding and switched-off parts are zero in both A and B; since each one's gradient is a multiple of the other they stay zero.

The same code applies one adapter to a whole batch and one adapter per row. Give every leaf a leading row axis for the latter:

    rows = rows_of(bank, index_B)     # every leaf [S, ...] -> [B, ...]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.ops import LoraSpec

type Leaf = jax.Array | np.ndarray
"""An adapter lives on the device, or in host memory while it is made, loaded and saved."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """One projection's A, B and scale: the parts' outputs gain `scale * (x @ a_part) @ b_part`."""

    a: Leaf  # [in, parts * max_rank]
    b: tuple[Leaf, ...]  # one [max_rank, out_part] each
    scale: Leaf  # [] float32, alpha / rank; never trained


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAdapter:
    """The four projections of a layer. Stacked over layers every leaf has a leading L axis, `scale` included."""

    qkv: LowRank
    o: LowRank
    gate_up: LowRank
    down: LowRank


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A whole model's adapter: stacked layers and the output head."""

    layers: LayerAdapter
    head: LowRank


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """Shape of one adapted projection and the Hugging Face names of its parts."""

    inputs: int
    outputs: tuple[int, ...]
    parts: tuple[str, ...]


def layer_projections(config: ModelConfig) -> dict[str, Projection]:
    """The adapted projections of one layer by field of `LayerAdapter`."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    return {
        "qkv": Projection(inputs=hidden, outputs=config.qkv_widths, parts=attention),
        "o": Projection(inputs=config.qkv_widths[0], outputs=(hidden,), parts=("self_attn.o_proj",)),
        "gate_up": Projection(inputs=hidden, outputs=(ffn, ffn), parts=("mlp.gate_proj", "mlp.up_proj")),
        "down": Projection(inputs=ffn, outputs=(hidden,), parts=("mlp.down_proj",)),
    }


def head_projection(config: ModelConfig) -> Projection:
    return Projection(inputs=config.hidden_size, outputs=(config.vocab_size,), parts=("lm_head",))


def check_spec(spec: LoraSpec, *, max_rank: int) -> None:
    """Refuse an adapter this server cannot hold. Raises UserError."""
    if not 1 <= spec.rank <= max_rank:
        raise UserError(f"LoRA rank {spec.rank} is outside 1..{max_rank}: choose another, or start the server with a larger max_lora_rank")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("nothing to train: set at least one of train_attn, train_mlp, train_unembed")


def is_trained(spec: LoraSpec, field: str) -> bool:
    """Whether the projection `field` (a name of `LayerAdapter`, or "head") belongs to a part that is switched on."""
    match field:
        case "qkv" | "o":
            return spec.train_attn
        case "gate_up" | "down":
            return spec.train_mlp
        case "head":
            return spec.train_unembed
    raise AssertionError(f"no adapted projection is called {field}")


def init_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """A fresh adapter in host memory: A uniform in +-1/sqrt(in) from `spec.seed`, B zero, so that it changes nothing yet.

    Each projection draws from its own stream, so switching a part off leaves the others' values as they were.
    """
    check_spec(spec, max_rank=max_rank)
    streams = dict(zip((*LayerAdapter.__dataclass_fields__, "head"), np.random.SeedSequence(spec.seed).spawn(5), strict=True))

    def draw(field: str, projection: Projection, stack: tuple[int, ...]) -> LowRank:
        a = np.zeros((*stack, projection.inputs, len(projection.parts), max_rank), np.float32)
        if is_trained(spec, field):
            bound = projection.inputs**-0.5
            a[..., : spec.rank] = np.random.default_rng(streams[field]).uniform(-bound, bound, (*a.shape[:-1], spec.rank))
        nothing = _zeros(projection, stack, max_rank)
        return replace(nothing, a=a.reshape(*stack, projection.inputs, -1), scale=np.full(stack, spec.alpha / spec.rank, np.float32))

    layers = {field: draw(field, projection, (config.num_layers,)) for field, projection in layer_projections(config).items()}
    return Adapter(layers=LayerAdapter(**layers), head=draw("head", head_projection(config), ()))


def zero_adapter(config: ModelConfig, max_rank: int) -> Adapter:
    """All zeros in host memory: the base model, an empty gradient, fresh moments."""
    layers = {field: _zeros(p, (config.num_layers,), max_rank) for field, p in layer_projections(config).items()}
    return Adapter(layers=LayerAdapter(**layers), head=_zeros(head_projection(config), (), max_rank))


def trainable_mask(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """Ones where the optimizer may write and zeros elsewhere, in host memory; leaves broadcast against an adapter's."""

    def mask(field: str, projection: Projection, stack: tuple[int, ...]) -> LowRank:
        rank = (np.arange(max_rank) < (spec.rank if is_trained(spec, field) else 0)).astype(np.float32)
        return LowRank(
            a=np.tile(rank, len(projection.parts)).reshape(*stack, 1, -1),
            b=tuple(rank.reshape(*stack, -1, 1) for _ in projection.parts),
            scale=np.zeros(stack, np.float32),
        )

    layers = {field: mask(field, projection, (1,)) for field, projection in layer_projections(config).items()}
    return Adapter(layers=LayerAdapter(**layers), head=mask("head", head_projection(config), ()))


def rows_of[Tree](bank: Tree, index_B: jax.Array) -> Tree:
    """Each row's own adapter: every leaf [S, ...] -> [B, ...]."""
    return jax.tree.map(lambda leaf: leaf[index_B], bank)


def project(x: jax.Array, weight: jax.Array, widths: tuple[int, ...], module: LowRank | None) -> tuple[jax.Array, ...]:
    """x [B, T, in] @ weight [in, sum(widths)] plus the adapter's delta, split into the parts of a fused projection.

    `module` is one adapter for the whole batch, one per row (every leaf with a leading B axis), or None for the base model.
    """
    outputs = jnp.split(x @ weight, np.cumsum(widths)[:-1], axis=-1)
    if module is None:
        return tuple(outputs)
    return tuple(output + delta for output, delta in zip(outputs, low_rank_deltas(x, module), strict=True))


def low_rank_deltas(x: jax.Array, module: LowRank) -> tuple[jax.Array, ...]:
    """The adapter's part of a projection of x [B, T, in], one [B, T, out_part] per part, in x's dtype."""
    per_row = module.a.ndim == 3
    scale = jax.lax.stop_gradient(module.scale).astype(x.dtype)
    down, up = ("bti,bir->btr", "btr,bro->bto") if per_row else ("bti,ir->btr", "btr,ro->bto")
    inner = jnp.einsum(down, x, module.a.astype(x.dtype)) * (scale[:, None, None] if per_row else scale)
    return tuple(
        jnp.einsum(up, part, b.astype(x.dtype)) for part, b in zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    )


def _zeros(projection: Projection, stack: tuple[int, ...], max_rank: int) -> LowRank:
    return LowRank(
        a=np.zeros((*stack, projection.inputs, len(projection.parts) * max_rank), np.float32),
        b=tuple(np.zeros((*stack, max_rank, width), np.float32) for width in projection.outputs),
        scale=np.zeros(stack, np.float32),
    )
