"""Plans the memory of each device before any weights are loaded: `dry_run=true` prints the plan and refuses
what does not fit.

The memory of a training batch is that of the compiled program, as XLA reports it. This takes the time of one
compilation, which the server then reads from the persistent cache, and it is correct for every model family,
mesh and remat policy, unlike a formula.
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
"""Adapter, summed gradient, gradient of the current operation, and Adam's two moments."""
COPIES_PER_STEP = 5
"""In an optimizer step: the new adapter and moments, the masked gradient, and the zeros that stand for a missing gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """A use of memory, and the option that reduces it."""

    name: str
    num_bytes: int
    lower: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
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
        items = sorted((item for item in self.items if item.lower), key=lambda item: -item.num_bytes)
        return ", ".join(f"{item.lower} ({_gib(item.num_bytes)} of {item.name})" for item in items[:2])

    def __str__(self) -> str:
        lines = [f"memory plan for {self.device}, {_gib(self.available_bytes)} available"]
        lines += [f"  {_gib(item.num_bytes):>12}  {item.name}" for item in self.items]
        return "\n".join([*lines, f"  {_gib(self.total_bytes):>12}  together"])


def plan_memory(settings: EngineOptions) -> MemoryPlan:
    """Return the plan of an executor with these options and as many training models as it keeps on the
    device.

    Loads no weights, but compiles the training program.
    """
    use_compilation_cache(settings)
    model, available = resolve_model(settings), device_memory.free_bytes(settings)
    config, dtype, cache = model.config, model.dtype, _planned_cache(model, available)
    adapter, longest = adapter_size(config, settings.max_lora_rank), model.train_shapes.shapes[-1]
    each = f", each of {settings.mesh.devices} devices" if config.mesh is not None else ""
    programs = (  # one runs at a time
        MemoryItem(
            name=f"a training batch with streams of {longest.length} tokens",
            num_bytes=_training_bytes(model, longest, device_memory.fitting_remat(model, available)),
            lower="train_tokens_per_batch" if longest == model.train_shapes.budget else "max_context_length",
        ),
        MemoryItem(
            name=f"what a decode block copies, with {cache.slots} sequences of {model.context} tokens",
            num_bytes=cache.copy_bytes + device_memory.copied_layers_bytes(model),
            lower="max_num_seqs or max_context_length" if cache.copy_bytes else "",
        ),
    )
    return MemoryPlan(
        device=f"{jax.default_backend()} ({jax.local_devices()[0].device_kind}){each}",
        available_bytes=int(available),
        items=(
            MemoryItem(
                name=f"base weights, {dtype.name}",
                num_bytes=bytes_per_device(param_shapes(config, dtype)),
                lower="dtype=bfloat16" if dtype.itemsize > 2 else "",
            ),
            MemoryItem(
                name=f"pages for keys and values of {(cache.pages - 1) * PAGE_SIZE} tokens",
                num_bytes=cache.pages_bytes,
                lower="cache_tokens",
            ),
            MemoryItem(
                name=f"{settings.max_models} models in training, rank {settings.max_lora_rank}, and one's next step",
                num_bytes=(settings.max_models * COPIES_PER_MODEL + COPIES_PER_STEP) * 4 * adapter,
                lower="max_models or max_lora_rank",
            ),
            MemoryItem(
                name=f"{settings.max_loras} sampler snapshots and the base model's place",
                num_bytes=(settings.max_loras + 1) * dtype.itemsize * adapter,
                lower="max_loras",
            ),
            max(programs, key=lambda item: item.num_bytes),
        ),
    )


def check_snapshots(settings: EngineOptions) -> None:
    """Raise ConfigError if the LoRA slots, which are allocated at the start, do not fit beside the base
    weights. Compiles nothing."""
    model = resolve_model(settings)
    place = model.dtype.itemsize * adapter_size(model.config, settings.max_lora_rank)
    weights = bytes_per_device(param_shapes(model.config, model.dtype))
    available = device_memory.free_bytes(settings)
    if jax.default_backend() == "cpu":
        available = min(available, available_host_bytes())
    if weights + (settings.max_loras + 1) * place > available:
        raise ConfigError(
            f"max_loras={settings.max_loras}: as many of rank {settings.max_lora_rank} take "
            f"{_gib((settings.max_loras + 1) * place)} beside {_gib(weights)} of base weights, and {_gib(int(available))} "
            "are available; lower max_loras or max_lora_rank"
        )


def _planned_cache(model: ResolvedModel, available_bytes: float) -> CacheSize:
    """Return the requested size or, if pages are read in place and no option gives their number, the size
    that fits."""
    requested, settings = requested_cache(model), model.settings
    if settings.cache_tokens is not None or requested.copied_pages:
        return requested
    adapter = adapter_size(model.config, settings.max_lora_rank)
    of_adapters = (4 + (settings.max_loras + 1) * model.dtype.itemsize) * adapter
    held = bytes_per_device(param_shapes(model.config, model.dtype)) + of_adapters
    return fitting_cache(model, device_memory.cache_budget_bytes(model, available_bytes - held))


def _training_bytes(model: ResolvedModel, shape: BucketShape, remat: Remat) -> int:
    """Return the bytes of a training batch of that shape on each device: its arrays and the temporaries of
    the program."""
    batch, config = dummy_batch(shape), model.config
    adapter = place_adapter(config, zero_adapter(config, model.settings.max_lora_rank))
    loss = select_loss(LossFn.CROSS_ENTROPY)
    lowered = forward_backward.lower(
        adapter, adapter, param_shapes(config, model.dtype), batch, loss, config=config, remat=remat
    )
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None, "XLA reports the memory of programs on every backend"
    return analysis.temp_size_in_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // shape.streams


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
