"""Chooses the layout of the projections and LoRA factors in the matrix products of one CPU: [outputs, inputs]
as in Hugging Face's files, or [inputs, outputs].

XLA multiplies a few rows by large weights [inputs, outputs] in two thirds of the time that it needs for
weights [outputs, inputs]. LoRA slots (the stacked adapters of the sampler) store the factors as [inputs,
outputs], so with the layout [outputs, inputs] every decode dispatch (a program call of several decode steps)
must transpose the factors. However, with the layout [inputs, outputs] and some numbers of inputs, XLA's order
of summation depends on the number of rows. A completion would then depend on the other sequences of its
batch. Therefore the server computes test products of the model's shapes when it starts. It uses the layout
[inputs, outputs] only if the bits of these products are the same for all numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.families.layer_spec import Weight
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.lora.adapter import adapted_modules, zero_adapter
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import CPU_PREFILL, PREFILL_TILE, decode_widths

MIN_BYTES = 2**28
"""The minimum size of all projections together for which the layout [inputs, outputs] is used. The caches of
a CPU hold smaller weights, and the layout then makes little difference."""


type Shape = tuple[int, ...]


def with_weight_layout(
    config: ModelConfig, *, dtype: np.dtype, num_slots: int, max_lora_rank: int
) -> ModelConfig:
    """Return the configuration with `inputs_first` set if the test products have the same bits for all widths
    of decode batches and all sizes of prefill batches. A decode batch has at most `num_slots` sequences.

    The layout [inputs, outputs] is used only for float32 models on one CPU, without latent attention and with
    projections of at least MIN_BYTES together.
    """
    if on_gpu() or config.mesh is not None or config.latent is not None or dtype != np.float32:
        return config
    if sum(math.prod(weight.shape) for weight in _projections(config)) * dtype.itemsize < MIN_BYTES:
        return config
    weights = {weight.shape[::-1] for weight in _projections(config)}
    factors = {
        leaf.shape[-2:]
        for _, module in adapted_modules(config, zero_adapter(config, max_lora_rank))
        for leaf in (module.a, *module.b)
    }
    prefill = tuple(tiles * PREFILL_TILE for tiles in (CPU_PREFILL.short, CPU_PREFILL.long))
    is_exact = rows_are_independent(weights | factors, decode_widths(num_slots)) and rows_are_independent(
        weights, prefill
    )
    return replace(config, inputs_first=is_exact)


def rows_are_independent(shapes: Iterable[Shape], numbers: Sequence[int]) -> bool:
    """Return whether products with weights of these shapes [inputs, outputs] have the same bits for all
    `numbers` of rows."""
    rng = np.random.default_rng(0)
    weights = [rng.random(shape, np.float32) - 0.5 for shape in sorted(shapes)]
    tokens = [rng.random((numbers[0], 1, len(weight)), np.float32) - 0.5 for weight in weights]
    return bool(_repeated_rows_are_equal(tokens, weights, numbers=tuple(numbers)))


def _projections(config: ModelConfig) -> list[Weight]:
    return [
        weight
        for stack in stacks_of(config)
        for _ in stack.layers
        for weight in stack.weights.values()
        if weight.is_projection
    ]


@partial(jax.jit, static_argnames="numbers")
def _repeated_rows_are_equal(
    tokens: Sequence[jax.Array], weights: Sequence[jax.Array], *, numbers: tuple[int, ...]
) -> jax.Array:
    """For each number of rows in `numbers`, make a batch that repeats the rows of `tokens`
    [numbers[0], 1, in], and multiply it by the weight [in, out]. Return whether equal rows have equal
    products in all batches."""
    is_equal = jnp.array(True)
    for x, weight in zip(tokens, weights, strict=True):
        index = [jnp.arange(number) % numbers[0] for number in numbers]
        products = [jnp.einsum("bti,io->bto", x[rows], weight) for rows in index]
        products = jax.lax.optimization_barrier(products)
        for rows, product in zip(index, products, strict=True):
            is_equal &= (product == products[0][rows]).all()
    return is_equal
