"""LoRA adapters as pytrees. Their shapes depend only on the model and on `max_lora_rank`, so a new adapter
needs no further compilation.

A fused projection (q|k|v, gate|up) has one A with the columns of all parts, and one B per part. The factors
of each part are padded to the rank `max_lora_rank`. The padding and the factors of untrained projections are
zero in both A and B. They stay zero, because the gradient of each factor is proportional to the other
factor.

For the factors of routed experts, the rank of the adapter and `max_lora_rank` are divided by the number of
routed experts that each token uses (`operations.expert_rank`). Routers have no adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import jax
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from skyrl_tx_server.engine.operations import LoraSpec, expert_rank
from skyrl_tx_server.model.families.layer_spec import LoraTarget, Stack, Weight
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices, LoraWeights
from skyrl_tx_server.model.mesh import put
from skyrl_tx_server.model.model_config import ModelConfig

type LayerAdapter = dict[str, LoraWeights]
"""Maps the name of each projection in `Stack.weights`, for example "qkv", to its LoRA factors, for one layer
or stacked over layers. In a stack, every leaf, including `scale`, has a leading axis of layers. In LoRA slots
(the stacked adapters of the sampler), an axis of slots comes before the axis of layers."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    layers: tuple[LayerAdapter, ...]  # one per stack
    head: LoraWeights


def adapted_stacks(config: ModelConfig) -> tuple[Stack, ...]:
    """Return the stacks of the model, reduced to the projections that have adapters. A stack is a group of
    consecutive equal layers."""
    return tuple(
        replace(
            stack,
            weights={field: weight for field, weight in stack.weights.items() if weight.switch is not None},
        )
        for stack in stacks_of(config)
    )


def adapted_modules(config: ModelConfig, adapter: Adapter) -> Iterator[tuple[Weight, LoraWeights]]:
    """Yield the description of each adapted projection with its factors, stacked over layers. The output head
    is last."""
    for stack, layers in zip(adapted_stacks(config), adapter.layers, strict=True):
        for field, weight in stack.weights.items():
            yield weight, layers[field]
    yield head_weight(config), adapter.head


def head_weight(config: ModelConfig) -> Weight:
    """Return the description of the output head as an adapted projection."""
    return Weight(
        names=("lm_head.weight",),
        inputs=config.hidden_size,
        widths=(config.vocab_size,),
        switch=LoraTarget.UNEMBED,
    )


def rank_of(weight: Weight, config: ModelConfig, rank: int) -> int:
    """Return the rank of the factors of one projection in an adapter of rank `rank`."""
    if config.experts is None or not weight.experts:
        return rank
    return expert_rank(rank, config.experts.per_token)


def is_trained(spec: LoraSpec, weight: Weight) -> bool:
    """Return whether `spec` trains this projection."""
    match weight.switch:
        case LoraTarget.ATTENTION:
            return spec.train_attn
        case LoraTarget.MLP:
            return spec.train_mlp
        case LoraTarget.UNEMBED:
            return spec.train_unembed
        case None:
            raise AssertionError(f"{weight.names} are not adapted")


def init_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """Return a new adapter in host memory. The factor A of each trained projection is drawn from the uniform
    distribution between -1/sqrt(in) and 1/sqrt(in), with `spec.seed`. The factor A of every other projection
    and the factor B of every projection are zero.

    Each projection has its own random stream, so its values do not depend on which other projections are
    trained.
    """
    seeds = np.random.SeedSequence(spec.seed)

    def draw(weight: Weight, layer_shape: tuple[int, ...]) -> LoraWeights:
        (stream,) = seeds.spawn(1)
        zeros = _zeros(weight, config, layer_shape, max_rank)
        rank = rank_of(weight, config, spec.rank)
        a = zeros.a.reshape(*zeros.a.shape[:-1], len(weight.names), -1)
        if is_trained(spec, weight):
            bound = weight.inputs**-0.5
            a[..., :rank] = np.random.default_rng(stream).uniform(-bound, bound, (*a.shape[:-1], rank))
        scale = np.full(layer_shape, spec.alpha / rank, np.float32)
        return replace(zeros, a=a.reshape(zeros.a.shape), scale=scale)

    return _make_adapter(config, draw)


def zero_adapter(config: ModelConfig, max_rank: int) -> Adapter:
    """Return an adapter of zeros in host memory, for the base model, as a zero gradient, or as the initial
    moments of the optimizer."""
    return _make_adapter(config, lambda weight, layer_shape: _zeros(weight, config, layer_shape, max_rank))


def trainable_mask(config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """Return ones where the optimizer may change an adapter and zeros elsewhere, in host memory. The leaves
    broadcast against those of an adapter."""

    def mask(weight: Weight, layer_shape: tuple[int, ...]) -> LoraWeights:
        trained = rank_of(weight, config, spec.rank) if is_trained(spec, weight) else 0
        rank = (np.arange(rank_of(weight, config, max_rank)) < trained).astype(np.float32)
        broadcast = (1,) * len(layer_shape)
        lead = (*broadcast, 1) if weight.experts else broadcast
        return LoraWeights(
            a=np.tile(rank, len(weight.names)).reshape(*lead, 1, -1),
            b=tuple(rank.reshape(*lead, -1, 1) for _ in weight.names),
            scale=np.zeros(broadcast, np.float32),
        )

    return _make_adapter(config, mask)


def place_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Place an adapter, or a gradient, moment, mask or stack of LoRA slots, on the devices. Factors of routed
    experts are placed on the devices of their experts, all other factors on every device."""
    return put(adapter, adapter_shardings(config, adapter))


def keep_adapter(config: ModelConfig, adapter: Adapter) -> Adapter:
    """Inside a program: constrain `adapter` to the shardings of `place_adapter`."""
    if config.mesh is None:
        return adapter
    return jax.lax.with_sharding_constraint(adapter, adapter_shardings(config, adapter))


def adapter_size(config: ModelConfig, max_rank: int) -> int:
    """Return the number of elements of an adapter on each device."""
    adapter = zero_adapter(config, max_rank)
    shardings = adapter_shardings(config, adapter)
    if shardings is None:
        return sum(leaf.size for leaf in jax.tree.leaves(adapter))
    sizes = jax.tree.map(lambda leaf, sharding: prod(sharding.shard_shape(leaf.shape)), adapter, shardings)
    return sum(jax.tree.leaves(sizes))


def slot_layer(modules: LayerAdapter, indices: LoraIndices, layer: ArrayLike) -> LayerAdapter:
    """Return a copy of `modules`, the LoRA slots of a stack, in which `LoraWeights.indices` and
    `LoraWeights.layer` are set, so that the functions of `lora_math` use the factors of layer `layer`. Every
    leaf keeps its leading axes of slots and of layers."""
    return {field: replace(module, indices=indices, layer=layer) for field, module in modules.items()}


def adapter_shardings(config: ModelConfig, adapter: Adapter) -> Adapter | None:
    """Return a sharding for every leaf, or None if there is only one device."""
    mesh = config.mesh
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())

    def sharding(leaf: ArrayLike, experts: int) -> NamedSharding:
        if experts and leaf.ndim > 3 and leaf.shape[-3] == experts:
            return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 3), "expert", None, None))
        return everywhere

    modules = adapted_modules(config, adapter)

    def module_shardings(weight: Weight, layer_shape: tuple[int, ...]) -> LoraWeights:
        return jax.tree.map(partial(sharding, experts=weight.experts), next(modules)[1])

    return _make_adapter(config, module_shardings)


def _make_adapter(config: ModelConfig, make: Callable[[Weight, tuple[int, ...]], LoraWeights]) -> Adapter:
    """Return an adapter in which the factors of each projection are `make(weight, layer_shape)`, where
    `weight` describes the projection. `layer_shape` is (number of layers of the stack,), or () for the output
    head, which is created last."""
    layers = tuple(
        {field: make(weight, (len(stack.layers),)) for field, weight in stack.weights.items()}
        for stack in adapted_stacks(config)
    )
    return Adapter(layers=layers, head=make(head_weight(config), ()))


def _zeros(weight: Weight, config: ModelConfig, layer_shape: tuple[int, ...], max_rank: int) -> LoraWeights:
    rank = rank_of(weight, config, max_rank)
    lead = (*layer_shape, weight.experts) if weight.experts else layer_shape
    return LoraWeights(
        a=np.zeros((*lead, weight.inputs, len(weight.names) * rank), np.float32),
        b=tuple(np.zeros((*lead, rank, width), np.float32) for width in weight.widths),
        scale=np.zeros(layer_shape, np.float32),
    )
