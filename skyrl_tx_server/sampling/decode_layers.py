"""Runs the layers of the model in a decode step. An unrolled program contains every layer. A rolled program
contains a loop over the layers. A dispatch is one call of such a program, which runs several decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.families.layer_spec import LayerParams, Stack
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.kv_cache import KVCache, Segment
from skyrl_tx_server.model.layers import Rope
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter, slot_layer
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig, RopeSpec
from skyrl_tx_server.model.transformer import Params, by_layer, layer, reads_in_place, split_stack

type Past = list[Segment] | None
"""The keys and values of a layer from before the dispatch, copied from their pages into contiguous segments.
None: a kernel reads the pages in place."""

type Recent = list[Segment] | Segment | KVCache
"""The keys and values of this dispatch: one segment per layer, one segment of stacked layers, or the KV cache
if each step writes its keys and values to their pages."""

type AttendInLayer = Callable[
    [ArrayLike | int, Past, Recent, jax.Array, AttentionSpec, jax.Array, jax.Array, jax.Array],
    tuple[jax.Array, Recent],
]
"""(layer, past, recent, step, spec, q, k, v) -> (attended, `recent` with the keys and values k and v). In a
loop over layers, `recent` is the segment of one layer or the KV cache."""

type RunLayers = Callable[[jax.Array, Mapping[RopeSpec, Rope], Recent, jax.Array], tuple[jax.Array, Recent]]
"""(x, rotary tables, keys and values of this dispatch, step) -> (x after all layers, the keys and values with
those of this step). x [B, 1, D] contains the hidden states of B sequences."""


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
    reads_stacks = reads_in_place(config)
    sliced_once = by_layer(config, model.params) if on_gpu() or not reads_stacks else []

    def run(
        x: jax.Array, ropes: Mapping[RopeSpec, Rope], recent: Recent, step: jax.Array
    ) -> tuple[jax.Array, Recent]:
        # With `reads_stacks`, the stacked matrices are sliced here, inside the loop over steps. If they were
        # sliced outside the loop, XLA would copy them. On a GPU, the stacked vectors are sliced once outside
        # the loop, because a slice that a Pallas kernel reads would otherwise be copied in each step.
        layers = by_layer(config, model.params) if reads_stacks else sliced_once
        if on_gpu():
            layers = [
                weights | {field: leaf for field, leaf in sliced.items() if leaf.ndim == 1}
                for weights, sliced in zip(layers, sliced_once, strict=True)
            ]
        for number, (stack, weights, adapter) in enumerate(zip(stacks, layers, adapters, strict=True)):
            attend = partial(model.attend, number, pasts[number], recent, step)
            x, recent = layer(config, stack, x, weights, adapter, ropes, attend)
        return x, recent

    return run


def rolled_layers(model: DecodeModel) -> RunLayers:
    """Return a function with one loop for each stack of layers. Segments are stacked over the layers."""
    config = model.config
    past = jax.lax.map(model.read_past, jnp.arange(config.num_layers))

    def run(
        x: jax.Array, ropes: Mapping[RopeSpec, Rope], recent: Recent, step: jax.Array
    ) -> tuple[jax.Array, Recent]:
        cache = recent if isinstance(recent, KVCache) else None
        segments = None if isinstance(recent, KVCache) else recent
        written: list[Recent | None] = []
        for stack, weights, modules in zip(
            stacks_of(config), model.params.layers, model.lora_slots.layers, strict=True
        ):
            sliced, whole = split_stack(config, weights)

            def body(
                state: tuple[jax.Array, KVCache | None],
                layer_inputs: tuple[jax.Array, LayerParams, Past, Segment | None],
                stack: Stack = stack,
                whole: LayerParams = whole,
                modules: LayerAdapter = modules,
            ) -> tuple[tuple[jax.Array, KVCache | None], Recent | None]:
                (x, cache), (number, weights, past, segment) = state, layer_inputs
                before = cache or segment
                assert before is not None
                adapter = slot_layer(modules, model.indices, number - stack.layers.start)
                attend = partial(model.attend, number, past, before, step)
                x, after = layer(config, stack, x, weights | whole, adapter, ropes, attend)
                return ((x, after), None) if isinstance(after, KVCache) else ((x, None), after)

            span = slice(stack.layers.start, stack.layers.stop)
            stack_past, stack_segments = jax.tree.map(lambda leaf, span=span: leaf[span], (past, segments))
            numbers = jnp.arange(stack.layers.start, stack.layers.stop)
            (x, cache), segment = jax.lax.scan(
                body, (x, cache), (numbers, sliced, stack_past, stack_segments)
            )
            written.append(segment)
        return x, cache or jax.tree.map(lambda *parts: jnp.concatenate(parts), *written)

    return run
