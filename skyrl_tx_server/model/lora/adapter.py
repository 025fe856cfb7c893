"""LoRA adapters as pytrees. Their shape depends on the model and the server's maximum rank alone, so a new
adapter compiles no program.

A fused projection (q|k|v, gate|up) keeps one A with its parts' columns side by side and one B per part, each
part padded to `max_rank`. Padding and switched-off parts are zero in both A and B; since each one's gradient
is a multiple of the other they stay zero.

The experts that see a token share the adapter's rank (`operations.expert_rank`). Routers are not adapted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from skyrl_tx_server.engine.operations import LoraSpec, expert_rank
from skyrl_tx_server.model.families.layer_spec import LoraTarget, Stack, Weight
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices, LoraWeights
from skyrl_tx_server.model.mesh import put
from skyrl_tx_server.model.model_config import ModelConfig

type LayerAdapter = dict[str, LoraWeights]
"""A layer's adapted projections by field. Stacked over layers every leaf has a leading axis of them, `scale`
included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A whole model's adapter: the layers of each of the family's stacks, and the output head."""

    layers: tuple[LayerAdapter, ...]
    head: LoraWeights


def adapted_stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """The family's stacks with their adapted projections alone, by field of `LayerAdapter`."""
    return tuple(
        replace(
            stack,
            weights={field: weight for field, weight in stack.weights.items() if weight.switch is not None},
        )
        for stack in stacks_of(config)
    )


def adapted_modules(config: ModelConfig, adapter: Adapter) -> Iterator[tuple[Weight, LoraWeights]]:
    """Every module of an adapter with what it adapts, stacked, the head last."""
    for stack, layers in zip(adapted_stacks(config), adapter.layers, strict=True):
        for field, weight in stack.weights.items():
            yield weight, layers[field]
    yield head_weight(config), adapter.head


def head_weight(config: ModelConfig) -> Weight:
    """The output head as an adapted projection; in memory its weight is [vocabulary, hidden]."""
    return Weight(
        names=("lm_head.weight",),
        inputs=config.hidden_size,
        widths=(config.vocab_size,),
        switch=LoraTarget.UNEMBED,
    )


def rank_of(weight: Weight, config: ModelConfig, rank: int) -> int:
    """The rank of one projection's factors where the adapter's is `rank`."""
    return (
        rank if config.experts is None or not weight.experts else expert_rank(rank, config.experts.per_token)
    )


def is_trained(spec: LoraSpec, weight: Weight) -> bool:
    """Whether `spec` trains this projection."""
    match weight.switch:
        case LoraTarget.ATTENTION:
            return spec.train_attn
        case LoraTarget.MLP:
            return spec.train_mlp
        case LoraTarget.UNEMBED:
            return spec.train_unembed
    raise AssertionError(f"{weight.names} are not adapted")


def init_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """A fresh adapter in host memory: A uniform in +-1/sqrt(in) from `spec.seed`, B zero, so that it changes
    nothing yet.

    Each projection draws from its own stream, so switching a part off leaves the others' values as they were.
    """
    seeds = np.random.SeedSequence(spec.seed)

    def draw(weight: Weight, stack: tuple[int, ...]) -> LoraWeights:
        (stream,) = seeds.spawn(1)
        nothing = _zeros(weight, config, stack, max_rank)
        rank = rank_of(weight, config, spec.rank)
        a = nothing.a.reshape(*nothing.a.shape[:-1], len(weight.names), -1)
        if is_trained(spec, weight):
            bound = weight.inputs**-0.5
            a[..., :rank] = np.random.default_rng(stream).uniform(-bound, bound, (*a.shape[:-1], rank))
        return replace(
            nothing, a=a.reshape(nothing.a.shape), scale=np.full(stack, spec.alpha / rank, np.float32)
        )

    return _made(config, draw)


def zero_adapter(config: ModelConfig, max_rank: int) -> Adapter:
    """All zeros in host memory: the base model, an empty gradient, fresh moments."""
    return _made(config, lambda weight, stack: _zeros(weight, config, stack, max_rank))


def trainable_mask(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """Ones where the optimizer may write and zeros elsewhere, in host memory; leaves broadcast against an
    adapter's."""

    def mask(weight: Weight, stack: tuple[int, ...]) -> LoraWeights:
        trained = rank_of(weight, config, spec.rank) if is_trained(spec, weight) else 0
        rank = (np.arange(rank_of(weight, config, max_rank)) < trained).astype(np.float32)
        stack = (1,) * len(stack)
        lead = (*stack, 1) if weight.experts else stack
        return LoraWeights(
            a=np.tile(rank, len(weight.names)).reshape(*lead, 1, -1),
            b=tuple(rank.reshape(*lead, -1, 1) for _ in weight.names),
            scale=np.zeros(stack, np.float32),
        )

    return _made(config, mask)


def place_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Copy an adapter from host memory to every device, experts' factors to the devices of their experts.
    Gradients, moments, masks and LoRA slots are placed likewise."""
    return put(adapter, adapter_shardings(config, adapter))


def keep_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Inside a program: constrain `adapter` to the shardings of `place_adapter`."""
    return (
        adapter
        if config.mesh is None
        else jax.lax.with_sharding_constraint(adapter, adapter_shardings(config, adapter))
    )


def adapter_size(config: ModelConfig, max_rank: int) -> int:
    """Return how many numbers of an adapter each device holds."""
    adapter = zero_adapter(config, max_rank)
    shardings = adapter_shardings(config, adapter)
    if shardings is None:
        return sum(leaf.size for leaf in jax.tree.leaves(adapter))
    return sum(
        jax.tree.leaves(
            jax.tree.map(lambda leaf, sharding: prod(sharding.shard_shape(leaf.shape)), adapter, shardings)
        )
    )


def slot_layers(lora_slots: Adapter, indices: LoraIndices) -> list[LayerAdapter]:
    """Return the LoRA slots of each layer of the model. Every leaf of `lora_slots` has a leading axis of
    slots."""
    return [
        {field: replace(module, indices=indices, layer=np.int32(index)) for field, module in modules.items()}
        for modules in lora_slots.layers
        for index in range(next(iter(modules.values())).scale.shape[1])
    ]


def adapter_shardings(config: ModelConfig, adapter: Adapter) -> Adapter | None:
    """Return a sharding for every leaf; None for one device."""
    mesh = config.mesh
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of(leaf: ArrayLike, experts: int) -> NamedSharding:
        divided = experts and leaf.ndim > 3 and leaf.shape[-3] == experts
        return (
            NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 3), "expert", None, None))
            if divided
            else everywhere
        )

    return _mapped(
        config, lambda weight, module: jax.tree.map(partial(of, experts=weight.experts), module), adapter
    )


def _made(config: ModelConfig, make: Callable[[Weight, tuple[int, ...]], LoraWeights]) -> Adapter:
    """An adapter of `make(weight, stack)`, where `stack` is the leading axis of layers; the head, which has
    none, comes last."""
    layers = tuple(
        {field: make(weight, (len(stack.layers),)) for field, weight in stack.weights.items()}
        for stack in adapted_stacks(config)
    )
    return Adapter(layers=layers, head=make(head_weight(config), ()))


def _mapped(
    config: ModelConfig, change: Callable[[Weight, LoraWeights], LoraWeights], adapter: Adapter
) -> Adapter:
    layers = tuple(
        {field: change(weight, modules[field]) for field, weight in stack.weights.items()}
        for stack, modules in zip(adapted_stacks(config), adapter.layers, strict=True)
    )
    return Adapter(layers=layers, head=change(head_weight(config), adapter.head))


def _zeros(weight: Weight, config: ModelConfig, stack: tuple[int, ...], max_rank: int) -> LoraWeights:
    rank = rank_of(weight, config, max_rank)
    lead = (*stack, weight.experts) if weight.experts else stack
    return LoraWeights(
        a=np.zeros((*lead, weight.inputs, len(weight.names) * rank), np.float32),
        b=tuple(np.zeros((*lead, rank, width), np.float32) for width in weight.widths),
        scale=np.zeros(stack, np.float32),
    )
