"""Free memory of a device, and its division between activations and the KV cache."""

from __future__ import annotations

import os

import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.executor.resolved_model import ResolvedModel
from skyrl_tx_server.model.mesh import bytes_per_device, weight_stationary
from skyrl_tx_server.model.transformer import Remat, reads_in_place, split_stack
from skyrl_tx_server.model.weights import param_shapes

CACHE_SHARE_OF_CPU_MEMORY = 0.25
CACHE_SHARE_OF_FREE_DEVICE_MEMORY = 0.5
ACTIVATIONS_SHARE_OF_MEMORY = 0.1


def free_bytes(settings: EngineOptions) -> float:
    """Return the free bytes of one device. On a CPU, return the device's share of the total memory, because
    the free memory varies."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / (settings.mesh.devices // jax.process_count())


def stats() -> dict[str, object]:
    """Return memory statistics; empty on a CPU, which has none."""
    counts = jax.local_devices()[0].memory_stats() or {}
    names = {
        "bytes_in_use": "device_bytes_in_use",
        "peak_bytes_in_use": "device_peak_bytes",
        "bytes_limit": "device_bytes_limit",
    }
    return {name: counts[key] for key, name in names.items() if key in counts}


def cache_budget_bytes(model: ResolvedModel, available_bytes: float) -> float:
    share = CACHE_SHARE_OF_CPU_MEMORY if jax.default_backend() == "cpu" else CACHE_SHARE_OF_FREE_DEVICE_MEMORY
    return max(0.0, available_bytes - copied_layers_bytes(model)) * share


def copied_layers_bytes(model: ResolvedModel) -> int:
    """Return the bytes of weights that a decode dispatch copies on each device: all layers without their
    experts, or nothing if the program reads them in place."""
    if reads_in_place(model.config):
        return 0
    config = weight_stationary(model.config)
    layers = param_shapes(config, model.dtype).layers
    return bytes_per_device([split_stack(config, stack)[0] for stack in layers])


def fitting_remat(model: ResolvedModel, available_bytes: float) -> Remat:
    """Return ACTIVATIONS if the matrix products of a batch fit into memory, else LAYERS, which takes about
    1.2 times as long."""
    fits = _bytes_with_products(model) <= available_bytes * ACTIVATIONS_SHARE_OF_MEMORY
    return Remat.ACTIVATIONS if fits else Remat.LAYERS


def _bytes_with_products(model: ResolvedModel) -> int:
    """Estimate the bytes that the layers keep on one device for a training batch (mostly matrix products),
    plus the bytes of one recomputed layer.

    The estimate needs no compilation and is the same on every rank.
    """
    config, settings = model.config, model.settings
    experts = config.experts
    copies = 1 if experts is None else experts.per_token + experts.shared
    expert_states = 0 if experts is None else 2 * copies * config.hidden_size
    divided = 3 * sum(config.qkv_widths) + 4 * copies * config.intermediate_size
    one_layer = 6 * config.hidden_size + expert_states + divided // config.tensor_shards
    gate_up = 2 * config.num_layers * config.intermediate_size
    if experts is not None:
        shared = (config.num_layers - experts.dense_layers) * experts.shared * config.intermediate_size
        gate_up = 2 * (shared + experts.dense_layers * experts.dense_width)
    products = config.num_layers * (config.projected_width + config.qkv_widths[0]) + gate_up
    kept = 2 * config.num_layers * config.hidden_size + products // config.tensor_shards
    tokens = -(-settings.train_tokens_per_batch // settings.mesh.batch)
    return tokens * (kept + one_layer) * model.dtype.itemsize
