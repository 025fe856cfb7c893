"""Plans the memory of each device before weights are loaded. `dry_run=true` prints the plan.

The training program is compiled, and XLA reports its memory for the model family, mesh and remat policy of
the server. The server later reads the program from the persistent compilation cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.engine.operations import LossFn
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor import device_memory
from skyrl_tx_server.executor.cache_size import CacheSize, fitting_cache, requested_cache
from skyrl_tx_server.executor.resolved_model import ResolvedModel, resolve_model, use_compilation_cache
from skyrl_tx_server.model.lora.adapter import adapter_size, place_adapter, zero_adapter
from skyrl_tx_server.model.mesh import bytes_per_device
from skyrl_tx_server.model.shapes import PAGE_SIZE, BucketShape
from skyrl_tx_server.model.transformer import Remat
from skyrl_tx_server.model.weights import param_shapes
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import dummy_batch
from skyrl_tx_server.training.train_step import forward_backward
from skyrl_tx_server.training.training_model_pool import available_host_bytes

COPIES_PER_MODEL = 5
"""Arrays of the adapter's size that each training model needs: the adapter, the summed gradient, the gradient
of the current operation, and Adam's two moments."""
COPIES_PER_STEP = 5
"""Arrays of the adapter's size that one optimizer step needs: the new adapter, its two new moments, the
masked gradient, and zeros in place of a missing gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """One part of the memory of a device."""

    name: str
    num_bytes: int
    option: str  # the option that reduces it; empty: no option does


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The parts of the memory of one device, and the memory that is available for them."""

    device: str
    available_bytes: int
    items: tuple[MemoryItem, ...]

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def advice(self) -> str:
        """Return the options that reduce the two largest items."""
        items = sorted((item for item in self.items if item.option), key=lambda item: -item.num_bytes)
        return ", ".join(f"{item.option} ({_gib(item.num_bytes)} of {item.name})" for item in items[:2])

    def __str__(self) -> str:
        lines = [f"memory plan for {self.device}, {_gib(self.available_bytes)} available"]
        lines += [f"  {_gib(item.num_bytes):>12}  {item.name}" for item in self.items]
        return "\n".join([*lines, f"  {_gib(self.total_bytes):>12}  total"])


def plan_memory(settings: EngineOptions) -> MemoryPlan:
    """Return the plan of an executor with `max_models` training models. Compiles the training program, but
    loads no weights."""
    use_compilation_cache(settings)
    model, available = resolve_model(settings), device_memory.free_bytes(settings)
    config, dtype, cache = model.config, model.dtype, _planned_cache(model, available)
    adapter, longest = adapter_size(config, settings.max_lora_rank), model.train_shapes.shapes[-1]
    per_device = f", each of {settings.mesh.devices} devices" if config.mesh is not None else ""
    programs = (  # only one runs at a time
        MemoryItem(
            name=f"a training batch with streams of {longest.length} tokens",
            num_bytes=_training_bytes(model, longest, device_memory.fitting_remat(model, available)),
            option="train_tokens_per_batch" if longest == model.train_shapes.budget else "max_context_length",
        ),
        MemoryItem(
            name=f"copies of a decode dispatch, {cache.slots} sequences of {model.max_context_length} tokens",
            num_bytes=cache.copy_bytes + device_memory.copied_layers_bytes(model),
            option="max_num_seqs or max_context_length" if cache.copy_bytes else "",
        ),
    )
    return MemoryPlan(
        device=f"{jax.default_backend()} ({jax.local_devices()[0].device_kind}){per_device}",
        available_bytes=int(available),
        items=(
            MemoryItem(
                name=f"base weights, {dtype.name}",
                num_bytes=bytes_per_device(param_shapes(config, dtype)),
                option="dtype=bfloat16" if dtype.itemsize > 2 else "",
            ),
            MemoryItem(
                name=f"KV cache of {(cache.pages - 1) * PAGE_SIZE} tokens",
                num_bytes=cache.pages_bytes,
                option="cache_tokens",
            ),
            MemoryItem(
                name=f"{settings.max_models} training models (rank {settings.max_lora_rank}), an Adam step",
                num_bytes=(settings.max_models * COPIES_PER_MODEL + COPIES_PER_STEP) * 4 * adapter,
                option="max_models or max_lora_rank",
            ),
            MemoryItem(
                name=f"{settings.max_loras + 1} LoRA slots of the sampler",
                num_bytes=(settings.max_loras + 1) * dtype.itemsize * adapter,
                option="max_loras",
            ),
            max(programs, key=lambda item: item.num_bytes),
        ),
    )


def check_snapshots(settings: EngineOptions) -> None:
    """Raise ConfigError if the base weights and the LoRA slots do not fit into memory. Both are allocated
    when the server starts. Compiles nothing."""
    model = resolve_model(settings)
    adapter_bytes = model.dtype.itemsize * adapter_size(model.config, settings.max_lora_rank)
    slots_bytes = (settings.max_loras + 1) * adapter_bytes
    weights = bytes_per_device(param_shapes(model.config, model.dtype))
    available = device_memory.free_bytes(settings)
    if jax.default_backend() == "cpu":
        available = min(available, available_host_bytes())
    if weights + slots_bytes > available:
        raise ConfigError(
            f"max_loras={settings.max_loras}: LoRA slots of rank {settings.max_lora_rank} take "
            f"{_gib(slots_bytes)} and base weights {_gib(weights)}, but {_gib(int(available))} are "
            "available; lower max_loras or max_lora_rank"
        )


def _planned_cache(model: ResolvedModel, available_bytes: float) -> CacheSize:
    """Return the requested size of the KV cache. If `cache_tokens` is not set and decoding reads the pages in
    place, the size is reduced to what fits."""
    requested, settings = requested_cache(model), model.settings
    if settings.cache_tokens is not None or requested.copied_pages:
        return requested
    adapter = adapter_size(model.config, settings.max_lora_rank)
    adapters_bytes = (4 + (settings.max_loras + 1) * model.dtype.itemsize) * adapter
    used = bytes_per_device(param_shapes(model.config, model.dtype)) + adapters_bytes
    return fitting_cache(model, device_memory.cache_budget_bytes(model, available_bytes - used))


def _training_bytes(model: ResolvedModel, shape: BucketShape, remat: Remat) -> int:
    """Return the bytes that a training batch takes on each device: its arrays and XLA's temporary buffers."""
    batch, config = dummy_batch(shape), model.config
    adapter = place_adapter(config, zero_adapter(config, model.settings.max_lora_rank))
    loss = select_loss(LossFn.CROSS_ENTROPY)
    lowered = forward_backward.lower(
        adapter, adapter, param_shapes(config, model.dtype), batch, loss, config=config, remat=remat
    )
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // shape.streams


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
