"""The free memory of a device, and the sizes of the arrays of a model on it."""

from __future__ import annotations

import os

import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.executor.resolved_model import ResolvedModel
from skyrl_tx_server.model.lora.adapter import adapter_size
from skyrl_tx_server.model.mesh import bytes_per_device, weight_stationary
from skyrl_tx_server.model.transformer import reads_in_place, split_stack
from skyrl_tx_server.model.weights import param_shapes

COPIES_PER_MODEL = 5
"""Number of arrays of the adapter's size that each training model needs: the adapter, the summed gradient,
the gradient of the current operation, and Adam's two moments."""
COPIES_PER_STEP = 5
"""Number of arrays of the adapter's size that one optimizer step needs: the new adapter, its two new moments,
the masked gradient, and zeros in place of a missing gradient."""


def free_bytes(settings: EngineOptions) -> float:
    """Return the free bytes of one device. On a CPU, return the device's share of the total memory, because
    the free memory varies."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / (settings.mesh.devices // jax.process_count())


def stats() -> dict[str, object]:
    """Return the memory statistics of the first local device. They are empty on a CPU."""
    counts = jax.local_devices()[0].memory_stats() or {}
    names = {
        "bytes_in_use": "device_bytes_in_use",
        "peak_bytes_in_use": "device_peak_bytes",
        "bytes_limit": "device_bytes_limit",
    }
    return {name: counts[key] for key, name in names.items() if key in counts}


def copied_layers_bytes(model: ResolvedModel) -> int:
    """Return the bytes of weights that a decode dispatch (a program call of several decode steps) copies on
    each device: all layers without their routed experts, or 0 if the program reads the layers in place."""
    if reads_in_place(model.config):
        return 0
    config = weight_stationary(model.config)
    layers = param_shapes(config, model.dtype).layers
    return bytes_per_device([split_stack(config, stack)[0] for stack in layers])


def weights_bytes(model: ResolvedModel) -> int:
    return bytes_per_device(param_shapes(model.config, model.dtype))


def training_models_bytes(model: ResolvedModel) -> int:
    """Return the bytes of `max_models` training models and one Adam step."""
    adapter = adapter_size(model.config, model.settings.max_lora_rank)
    return (model.max_models * COPIES_PER_MODEL + COPIES_PER_STEP) * 4 * adapter


def lora_slots_bytes(model: ResolvedModel) -> int:
    """Return the bytes of the LoRA slots of the sampler."""
    return (
        (model.max_loras + 1)
        * model.dtype.itemsize
        * adapter_size(model.config, model.settings.max_lora_rank)
    )
