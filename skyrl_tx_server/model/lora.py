"""LoRA adapters as a pytree whose shape depends only on the model and the server's maximum rank, so that no adapter compiles anything.

A fused projection (q|k|v, gate|up) keeps one A with its parts' columns side by side and one B per part, each part padded to
`max_rank`. Padding and switched-off parts are zero in both A and B; since each one's gradient is a multiple of the other they stay zero.

An expert's factors share the rank among the experts that see a token (`ops.expert_rank`); a router has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.families import family_of
from skyrl_tx_server.model.family import Switch, Weight
from skyrl_tx_server.model.low_rank import Leaf, LowRank, rows_of
from skyrl_tx_server.model.mesh import put
from skyrl_tx_server.ops import LoraSpec, expert_rank

type LayerAdapter = dict[str, LowRank]
"""A layer's adapted projections by field. Stacked over layers every leaf has a leading L axis, `scale` included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A whole model's adapter: stacked layers and the output head."""

    layers: LayerAdapter
    head: LowRank


def adapted_weights(config: ModelConfig) -> dict[str, Weight]:
    """The adapted projections of one layer by field of `LayerAdapter`."""
    return {field: weight for field, weight in family_of(config).weights(config).items() if weight.switch is not None}


def head_weight(config: ModelConfig) -> Weight:
    """The output head as an adapted projection; in memory its weight is [vocabulary, hidden]."""
    return Weight(names=("lm_head.weight",), inputs=config.hidden_size, widths=(config.vocab_size,), switch=Switch.UNEMBED)


def rank_of(weight: Weight, config: ModelConfig, rank: int) -> int:
    """The rank of one projection's factors where the adapter's is `rank`."""
    return rank if config.experts is None or not weight.experts else expert_rank(rank, config.experts.per_token)


def check_spec(spec: LoraSpec, *, max_rank: int) -> None:
    """Refuse an adapter this server cannot hold. Raises UserError."""
    if not 1 <= spec.rank <= max_rank:
        raise UserError(f"LoRA rank {spec.rank} is outside 1..{max_rank}: choose another, or start the server with a larger max_lora_rank")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("nothing to train: set at least one of train_attn, train_mlp, train_unembed")


def is_trained(spec: LoraSpec, weight: Weight) -> bool:
    """Whether an adapted projection belongs to a part that is switched on."""
    match weight.switch:
        case Switch.ATTENTION:
            return spec.train_attn
        case Switch.MLP:
            return spec.train_mlp
        case Switch.UNEMBED:
            return spec.train_unembed
    raise AssertionError(f"{weight.names} are not adapted")


def init_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """A fresh adapter in host memory: A uniform in +-1/sqrt(in) from `spec.seed`, B zero, so that it changes nothing yet.

    Each projection draws from its own stream, so switching a part off leaves the others' values as they were.
    """
    check_spec(spec, max_rank=max_rank)
    weights = adapted_weights(config)
    streams = dict(zip((*weights, "head"), np.random.SeedSequence(spec.seed).spawn(len(weights) + 1), strict=True))

    def draw(field: str, weight: Weight, stack: tuple[int, ...]) -> LowRank:
        nothing = _zeros(weight, config, stack, max_rank)
        rank = rank_of(weight, config, spec.rank)
        a = nothing.a.reshape(*nothing.a.shape[:-1], len(weight.names), -1)
        if is_trained(spec, weight):
            bound = weight.inputs**-0.5
            a[..., :rank] = np.random.default_rng(streams[field]).uniform(-bound, bound, (*a.shape[:-1], rank))
        return replace(nothing, a=a.reshape(nothing.a.shape), scale=np.full(stack, spec.alpha / rank, np.float32))

    layers = {field: draw(field, weight, (config.num_layers,)) for field, weight in weights.items()}
    return Adapter(layers=layers, head=draw("head", head_weight(config), ()))


def zero_adapter(config: ModelConfig, max_rank: int) -> Adapter:
    """All zeros in host memory: the base model, an empty gradient, fresh moments."""
    layers = {field: _zeros(weight, config, (config.num_layers,), max_rank) for field, weight in adapted_weights(config).items()}
    return Adapter(layers=layers, head=_zeros(head_weight(config), config, (), max_rank))


def trainable_mask(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """Ones where the optimizer may write and zeros elsewhere, in host memory; leaves broadcast against an adapter's."""

    def mask(weight: Weight, stack: tuple[int, ...]) -> LowRank:
        trained = rank_of(weight, config, spec.rank) if is_trained(spec, weight) else 0
        rank = (np.arange(rank_of(weight, config, max_rank)) < trained).astype(np.float32)
        lead = (*stack, 1) if weight.experts else stack
        return LowRank(
            a=np.tile(rank, len(weight.names)).reshape(*lead, 1, -1),
            b=tuple(rank.reshape(*lead, -1, 1) for _ in weight.names),
            scale=np.zeros(stack, np.float32),
        )

    layers = {field: mask(weight, (1,)) for field, weight in adapted_weights(config).items()}
    return Adapter(layers=layers, head=mask(head_weight(config), ()))


def place_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """An adapter from host memory to every device, experts' factors beside their experts; also a gradient, moment, mask or bank."""
    return put(adapter, _shardings(config, adapter))


def keep_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Inside a program: `adapter` lies where `place_adapter` puts one."""
    return adapter if config.mesh is None else jax.lax.with_sharding_constraint(adapter, _shardings(config, adapter))


def adapter_size(config: ModelConfig, max_rank: int) -> int:
    """How many numbers of an adapter lie on each device."""
    adapter = zero_adapter(config, max_rank)
    shardings = _shardings(config, adapter)
    if shardings is None:
        return sum(leaf.size for leaf in jax.tree.leaves(adapter))
    return sum(jax.tree.leaves(jax.tree.map(lambda leaf, sharding: prod(sharding.shard_shape(leaf.shape)), adapter, shardings)))


def adapters_of_rows(config: ModelConfig, bank: Adapter, index_B: jax.Array) -> Adapter:
    """Each row's own adapter, every leaf [S, ...] -> [B, ...]; but experts' factors stay a bank that `LowRank.rows` points into,
    because a row needs few of them."""

    def of(weight: Weight, module: LowRank) -> LowRank:
        if not weight.experts:
            return rows_of(module, index_B)
        return replace(module, rows=jnp.broadcast_to(index_B[:, None], (*index_B.shape, config.num_layers)))

    layers = {field: of(weight, bank.layers[field]) for field, weight in adapted_weights(config).items()}
    return Adapter(layers=layers, head=rows_of(bank.head, index_B))


def _shardings(config: ModelConfig, adapter: Adapter) -> Adapter | None:
    """A sharding in every leaf's place; None for one device."""
    mesh = config.mesh
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of(leaf: Leaf, experts: int) -> NamedSharding:
        divided = experts and leaf.ndim > 3 and leaf.shape[-3] == experts
        return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 3), "expert", None, None)) if divided else everywhere

    layers = {
        field: jax.tree.map(partial(of, experts=weight.experts), adapter.layers[field]) for field, weight in adapted_weights(config).items()
    }
    return Adapter(layers=layers, head=jax.tree.map(lambda leaf: everywhere, adapter.head))


def _zeros(weight: Weight, config: ModelConfig, stack: tuple[int, ...], max_rank: int) -> LowRank:
    rank = rank_of(weight, config, max_rank)
    lead = (*stack, weight.experts) if weight.experts else stack
    return LowRank(
        a=np.zeros((*lead, weight.inputs, len(weight.names) * rank), np.float32),
        b=tuple(np.zeros((*lead, rank, width), np.float32) for width in weight.widths),
        scale=np.zeros(stack, np.float32),
    )
