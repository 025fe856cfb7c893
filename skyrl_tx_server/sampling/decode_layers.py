"""The layers of the model in a decode step: unrolled in the program, or as a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.families.layer_spec import LayerParams, Stack
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.kv_cache import Segment
from skyrl_tx_server.model.layers import Rope
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter, slot_layer
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices
from skyrl_tx_server.model.model_config import ModelConfig, RopeSpec
from skyrl_tx_server.model.transformer import Params, by_layer, layer, reads_in_place, split_stack

type Past = list[Segment] | None
"""The cached positions of a layer. None: a kernel reads the pages in place."""

type AttendInLayer = Callable[
    [ArrayLike | int, Past, Segment, jax.Array, AttentionSpec, jax.Array, jax.Array, jax.Array],
    tuple[jax.Array, Segment],
]
"""(layer, past, recent, step, spec, q, k, v) -> (attended, new `recent`)."""

type Recent = list[Segment] | Segment
"""The keys and values of this dispatch by layer, or stacked over the layers."""

type RunLayers = Callable[[jax.Array, Mapping[RopeSpec, Rope], Recent, jax.Array], tuple[jax.Array, Recent]]
"""(x [B, 1, D], rotary tables, keys and values of this dispatch, step) -> (x after all layers, the keys and
values with those of this step)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeModel:
    """The layers of the model, and functions that read their KV cache and compute their attention."""

    config: ModelConfig
    params: Params
    lora_slots: Adapter
    indices: LoraIndices
    read_past: Callable[[ArrayLike | int], Past]
    attend: AttendInLayer


def unrolled_layers(model: DecodeModel) -> RunLayers:
    """Return a function that runs one layer after the other. The program contains every layer."""
    config = model.config
    stacks = [stack for stack in stacks_of(config) for _ in stack.layers]
    adapters = [
        slot_layer(modules, model.indices, np.array(index, np.int32))
        for stack, modules in zip(stacks_of(config), model.lora_slots.layers, strict=True)
        for index in range(len(stack.layers))
    ]
    pasts = [model.read_past(number) for number in range(config.num_layers)]
    unstacked = None if reads_in_place(config) else by_layer(config, model.params)

    def run(
        x: jax.Array, ropes: Mapping[RopeSpec, Rope], recents: Recent, step: jax.Array
    ) -> tuple[jax.Array, Recent]:
        assert isinstance(recents, list)
        written = []
        # Outside the loop over steps, a slice of the stacked weights would be a copy.
        layers = by_layer(config, model.params) if unstacked is None else unstacked
        for number, (stack, weights, adapter) in enumerate(zip(stacks, layers, adapters, strict=True)):
            attend = partial(model.attend, number, pasts[number], recents[number], step)
            x, recent = layer(config, stack, x, weights, adapter, ropes, attend)
            written.append(recent)
        return x, written

    return run


def rolled_layers(model: DecodeModel) -> RunLayers:
    """Return a function with one loop for each stack of layers. Keys and values are stacked over the
    layers."""
    config = model.config
    past = jax.lax.map(model.read_past, jnp.arange(config.num_layers))

    def run(
        x: jax.Array, ropes: Mapping[RopeSpec, Rope], recents: Recent, step: jax.Array
    ) -> tuple[jax.Array, Recent]:
        assert isinstance(recents, Segment)
        written = []
        for stack, weights, modules in zip(
            stacks_of(config), model.params.layers, model.lora_slots.layers, strict=True
        ):
            sliced, whole = split_stack(config, weights)

            def body(
                x: jax.Array,
                layer_inputs: tuple[jax.Array, LayerParams, Past, Segment],
                stack: Stack = stack,
                whole: LayerParams = whole,
                modules: LayerAdapter = modules,
            ) -> tuple[jax.Array, Segment]:
                number, weights, past, recent = layer_inputs
                adapter = slot_layer(modules, model.indices, number - stack.layers.start)
                attend = partial(model.attend, number, past, recent, step)
                return layer(config, stack, x, weights | whole, adapter, ropes, attend)

            span = slice(stack.layers.start, stack.layers.stop)
            stack_past, stack_recent = jax.tree.map(lambda leaf, span=span: leaf[span], (past, recents))
            numbers = jnp.arange(stack.layers.start, stack.layers.stop)
            x, recent = jax.lax.scan(body, x, (numbers, sliced, stack_past, stack_recent))
            written.append(recent)
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *written)

    return run
