"""Divides the memory of a device between the training programs and the KV cache before weights are loaded.

On a GPU, two training programs are compiled and XLA reports the memory that they need. The KV pages get the
remaining memory. The programs are stored in the persistent compilation cache (`compilation_cache_dir`), and
the server later reads those that it uses. On a CPU, no program is compiled. The KV pages get a fixed share of
the memory, and training keeps activations for the backward pass if their estimated size is at most another
fixed share.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import numpy as np

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.distributed.multihost import SINGLE_RANK, RankGroup
from skyrl_tx_server.engine.operations import LossFn
from skyrl_tx_server.executor.device_memory import (
    copied_layers_bytes,
    lora_slots_bytes,
    training_models_bytes,
    weights_bytes,
)
from skyrl_tx_server.executor.resolved_model import DEFAULT_LIMITS, ResolvedModel, resolve_model, with_limits
from skyrl_tx_server.model.kv_cache import page_bytes
from skyrl_tx_server.model.lora.adapter import place_adapter, zero_adapter
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE, BucketShape
from skyrl_tx_server.model.transformer import Remat
from skyrl_tx_server.model.weights import param_shapes
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import dummy_batch
from skyrl_tx_server.training.train_step import forward_backward

logger = logging.getLogger(__name__)

CACHE_SHARE_OF_CPU_MEMORY = 0.25
ACTIVATIONS_SHARE_OF_CPU_MEMORY = 0.2
RESERVED_SHARE_OF_GPU_MEMORY = 0.05
"""The share that is reserved for the temporary buffers of sampling programs and for fragmentation."""
TRAINING_SHARE_OF_REMAINING_MEMORY = 0.5
"""Training keeps activations for the backward pass in two cases. Both depend on the memory of the program
that keeps them for micro-batches of `train_tokens_per_batch` tokens (`BucketShapes.budget`). In the first
case, this program needs at most this share of the memory that remains after the reserved share and
`fixed_bytes`. In the second case, it needs no more memory than the program that recomputes the layers of the
longest streams."""
ESTIMATE_MARGIN = 1.2
"""`minimum_training_bytes` multiplies its estimate by this factor. For Qwen3-4B, XLA reports that the
training program with recomputed layers needs 1.1 times the estimate without the factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDivision:
    """How training and the KV cache share the memory of one device."""

    training_bytes: int | None  # batch and buffers of the largest training program; None on a CPU
    activations_length: int  # tokens of the longest stream whose activations are kept for the backward pass
    cache_bytes: float  # memory of the KV cache

    def remat(self, length: int) -> Remat:
        """Return ACTIVATIONS (keep the activations for the backward pass) if the activations of streams of
        this length fit into memory. Otherwise return LAYERS (recompute each layer), with which a step takes
        about 1.2 times as long."""
        return Remat.ACTIVATIONS if length <= self.activations_length else Remat.LAYERS


def fitting_model(settings: EngineOptions, available_bytes: float) -> ResolvedModel:
    """Resolve the options without a compilation. On a GPU, use the largest default limits that fit into
    memory, or the smallest if none fit. On a CPU, use the largest default limits."""
    model = resolve_model(settings)
    if not on_gpu():
        return model
    fitting = with_fitting_limits(settings, model.config, model.dtype, available_bytes)
    if fitting != model:
        logger.info(
            "using max_models=%d max_loras=%d max_context_length=%d for %.1f GiB of memory",
            fitting.max_models,
            fitting.max_loras,
            fitting.max_context_length,
            available_bytes / 2**30,
        )
    return fitting


def with_fitting_limits(
    settings: EngineOptions, config: ModelConfig, dtype: np.dtype, available_bytes: float
) -> ResolvedModel:
    """Return the model with the largest default limits that fit into the memory of a GPU. If none fit, return
    the model with the smallest limits."""
    models = [with_limits(settings, config, dtype, limits) for limits in DEFAULT_LIMITS]
    return next((model for model in models if _minimum_bytes(model) <= available_bytes), models[-1])


def divide_memory(
    model: ResolvedModel, available_bytes: float, ranks: RankGroup = SINGLE_RANK
) -> MemoryDivision:
    """Return how the available memory is divided. With several ranks, all of them must call this function."""
    shapes = model.train_shapes
    longest, budget = shapes.shapes[-1], shapes.budget
    if not on_gpu():
        activations_limit = available_bytes * ACTIVATIONS_SHARE_OF_CPU_MEMORY
        lengths = [
            shape.length
            for shape in shapes.shapes
            if _bytes_with_activations(model, shape.length) <= activations_limit
        ]
        return MemoryDivision(
            training_bytes=None,
            activations_length=max(lengths, default=0),
            cache_bytes=max(0.0, available_bytes - copied_layers_bytes(model)) * CACHE_SHARE_OF_CPU_MEMORY,
        )
    remaining_bytes = available_bytes * (1 - RESERVED_SHARE_OF_GPU_MEMORY) - fixed_bytes(model)
    # XLA may need all ranks for a compilation, so all ranks compile
    compiled = (
        temporary_bytes(model, budget, Remat.ACTIVATIONS),
        temporary_bytes(model, longest, Remat.LAYERS),
    )
    with_activations, with_layers = ranks.broadcast_from_rank0(lambda: compiled)
    training_bytes, activations_length = with_layers, 0
    if with_activations <= max(with_layers, remaining_bytes * TRAINING_SHARE_OF_REMAINING_MEMORY):
        training_bytes = max(with_layers, with_activations)
        activations_length = max(
            shape.length
            for shape in shapes.shapes
            if with_activations * shape.length <= training_bytes * budget.length
        )
    return MemoryDivision(
        training_bytes=training_bytes,
        activations_length=activations_length,
        cache_bytes=max(0.0, remaining_bytes - training_bytes),
    )


def fixed_bytes(model: ResolvedModel) -> int:
    """Return the bytes of the weights, of the layers that a decode dispatch copies, of the training models
    and of the LoRA slots. Training programs and the KV cache share the remaining bytes."""
    return (
        weights_bytes(model)
        + copied_layers_bytes(model)
        + training_models_bytes(model)
        + lora_slots_bytes(model)
    )


def temporary_bytes(model: ResolvedModel, shape: BucketShape, remat: Remat) -> int:
    """Compile the training program for a shape. Return the bytes of its batch and of its temporary buffers on
    each device."""
    batch, config = dummy_batch(shape), model.config
    adapter = place_adapter(config, zero_adapter(config, model.settings.max_lora_rank))
    loss = select_loss(LossFn.CROSS_ENTROPY)
    lowered = forward_backward.lower(
        adapter, adapter, param_shapes(config, model.dtype), batch, loss, config=config, remat=remat
    )
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // shape.streams


def _minimum_bytes(model: ResolvedModel) -> float:
    """Estimate the bytes that the model needs if the KV cache has the pages of one sequence only."""
    config, pages = model.config, -(-model.max_context_length // PAGE_SIZE) + 2  # as in `fitting_cache`
    cache = pages * page_bytes(config, model.dtype) / config.tensor_shards
    needed = fixed_bytes(model) + minimum_training_bytes(model) + cache
    return needed / (1 - RESERVED_SHARE_OF_GPU_MEMORY)


def minimum_training_bytes(model: ResolvedModel) -> float:
    """Estimate the temporary bytes of the longest training batch if its layers are recomputed."""
    layer_inputs = model.config.num_layers * model.config.hidden_size
    values = layer_inputs + _values_of_a_layer(model)
    return model.train_shapes.shapes[-1].length * values * model.dtype.itemsize * ESTIMATE_MARGIN


def _bytes_with_activations(model: ResolvedModel, tokens: int) -> int:
    """Estimate the bytes that training with Remat.ACTIVATIONS needs on one device for a stream of `tokens`
    tokens: the activations that all layers keep (mostly results of matrix products), and the values that the
    backward pass recomputes for one layer at a time.

    The estimate needs no compilation and is the same on every rank.
    """
    config = model.config
    experts = config.experts
    gate_up = 2 * config.num_layers * config.intermediate_size
    if experts is not None:
        shared = (config.num_layers - experts.dense_layers) * experts.shared * config.intermediate_size
        gate_up = 2 * (shared + experts.dense_layers * experts.dense_width)
    products = config.num_layers * (config.projected_width + config.qkv_widths[0]) + gate_up
    kept = 2 * config.num_layers * config.hidden_size + products // config.tensor_shards
    return tokens * (kept + _values_of_a_layer(model)) * model.dtype.itemsize


def _values_of_a_layer(model: ResolvedModel) -> int:
    """Estimate the number of values per token that the recomputation of a layer stores on one device."""
    config = model.config
    experts = config.experts
    copies = 1 if experts is None else experts.per_token + experts.shared
    expert_states = 0 if experts is None else 2 * copies * config.hidden_size
    divided = 3 * sum(config.qkv_widths) + 4 * copies * config.intermediate_size
    return 6 * config.hidden_size + expert_states + divided // config.tensor_shards
