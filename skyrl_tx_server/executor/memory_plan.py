"""Plans the memory of each device before weights are loaded. `dry_run=true` prints the plan.

The plan and the server both divide the memory with `memory_division.divide_memory`, which compiles training
programs on a GPU. On a CPU, the plan compiles one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor import device_memory
from skyrl_tx_server.executor.cache_size import fitting_cache, requested_cache
from skyrl_tx_server.executor.memory_division import divide_memory, fitting_model, temporary_bytes
from skyrl_tx_server.executor.resolved_model import use_compilation_cache, use_float32_products
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.training.training_model_pool import available_host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """One part of the memory of a device."""

    name: str
    num_bytes: int
    option: str  # the option that reduces the part; empty: no option does


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
        """Return the options of the two largest items that an option can reduce."""
        items = sorted((item for item in self.items if item.option), key=lambda item: -item.num_bytes)
        return ", ".join(f"{item.option} ({_gib(item.num_bytes)} of {item.name})" for item in items[:2])

    def __str__(self) -> str:
        lines = [f"memory plan for {self.device}, {_gib(self.available_bytes)} available"]
        lines += [f"  {_gib(item.num_bytes):>12}  {item.name}" for item in self.items]
        return "\n".join([*lines, f"  {_gib(self.total_bytes):>12}  total"])


def plan_memory(settings: EngineOptions) -> MemoryPlan:
    """Return the plan of a server with these options. Compiles training programs, but loads no weights."""
    use_compilation_cache(settings)
    available = device_memory.free_bytes(settings)
    model = fitting_model(settings, available)
    use_float32_products(model.dtype)
    division, longest = divide_memory(model, available), model.train_shapes.shapes[-1]
    # Without a GPU, the plan shows the requested cache even if the cache does not fit into memory. A server
    # that starts on this machine has fewer slots in this case, or it refuses to start.
    cache = fitting_cache(model, division.cache_bytes) if on_gpu() else requested_cache(model)
    training_bytes = division.training_bytes or temporary_bytes(
        model, longest, division.remat(longest.length)
    )
    per_device = f", each of {settings.mesh.devices} devices" if model.config.mesh is not None else ""
    programs = (  # only one of them runs at a time, so only the larger one counts
        MemoryItem(
            name=f"a training batch with streams of {longest.length} tokens",
            num_bytes=training_bytes,
            option="train_tokens_per_batch" if longest == model.train_shapes.budget else "max_context_length",
        ),
        MemoryItem(
            name=f"KV pages and layers that a decode dispatch copies, {cache.slots} sequences of "
            f"{model.max_context_length} tokens",
            num_bytes=cache.copy_bytes + device_memory.copied_layers_bytes(model),
            option="max_num_seqs or max_context_length" if cache.copy_bytes else "",
        ),
    )
    return MemoryPlan(
        device=f"{jax.default_backend()} ({jax.local_devices()[0].device_kind}){per_device}",
        available_bytes=int(available),
        items=(
            MemoryItem(
                name=f"base weights, {model.dtype.name}",
                num_bytes=device_memory.weights_bytes(model),
                option="dtype=bfloat16" if model.dtype.itemsize > 2 else "",
            ),
            MemoryItem(
                name=f"KV cache of {(cache.pages - 1) * PAGE_SIZE} tokens",
                num_bytes=cache.pages_bytes,
                option="cache_tokens",
            ),
            MemoryItem(
                name=f"{model.max_models} training models (rank {settings.max_lora_rank}) and one Adam step",
                num_bytes=device_memory.training_models_bytes(model),
                option="max_models or max_lora_rank",
            ),
            MemoryItem(
                name=f"{model.max_loras + 1} LoRA slots of the sampler",
                num_bytes=device_memory.lora_slots_bytes(model),
                option="max_loras",
            ),
            max(programs, key=lambda item: item.num_bytes),
        ),
    )


def check_snapshots(settings: EngineOptions) -> None:
    """Raise ConfigError if the base weights and the LoRA slots do not fit into memory. Both are allocated
    when the server starts. Compiles nothing."""
    available = device_memory.free_bytes(settings)
    model = fitting_model(settings, available)
    slots_bytes, weights = device_memory.lora_slots_bytes(model), device_memory.weights_bytes(model)
    if jax.default_backend() == "cpu":
        available = min(available, available_host_bytes())
    if weights + slots_bytes > available:
        raise ConfigError(
            f"max_loras={model.max_loras}: LoRA slots of rank {settings.max_lora_rank} take "
            f"{_gib(slots_bytes)} and base weights {_gib(weights)}, but {_gib(int(available))} are "
            "available; lower max_loras or max_lora_rank, or use a smaller base model"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
