"""What each device will hold in memory, found before any weights are loaded: `dry_run=true` prints it and refuses what does not fit.

What a training batch takes is what XLA says of the compiled program. That costs a dry run the seconds of one compilation, which the
server then finds in the persistent cache, and is right for every family, mesh and remat policy; a formula has to be told of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.engine.operations import LossFn
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor import device_memory
from skyrl_tx_server.executor.cache_size import CacheSize, asked_cache, fitting_cache
from skyrl_tx_server.executor.resolved_model import ServedModel, served_model, use_compilation_cache
from skyrl_tx_server.model.lora.adapter import adapter_size, place_adapter, zero_adapter
from skyrl_tx_server.model.mesh import bytes_per_device
from skyrl_tx_server.model.shapes import PAGE, BucketShape
from skyrl_tx_server.model.transformer import Remat
from skyrl_tx_server.model.weights import param_shapes
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import dummy_batch
from skyrl_tx_server.training.train_step import forward_backward
from skyrl_tx_server.training.training_model_pool import available_host_bytes

COPIES_PER_MODEL = 5
"""Adapter, summed gradient, the gradient of the operation under way, and Adam's two moments."""
COPIES_PER_STEP = 5
"""Of the model that takes an optimizer step: new adapter and moments beside the old ones, and its gradient without what is not trained;
and the zeros that stand for a gradient where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryItem:
    """One thing that takes memory, and which option makes it smaller."""

    name: str
    num_bytes: int
    lower: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    device: str
    available_bytes: int
    shares: tuple[MemoryItem, ...]

    @property
    def total_bytes(self) -> int:
        return sum(share.num_bytes for share in self.shares)

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def advice(self) -> str:
        """What to lower, the largest share that an option can lower first."""
        shares = sorted((share for share in self.shares if share.lower), key=lambda share: -share.num_bytes)
        return ", ".join(f"{share.lower} ({_gib(share.num_bytes)} of {share.name})" for share in shares[:2])

    def __str__(self) -> str:
        lines = [f"memory plan for {self.device}, {_gib(self.available_bytes)} available"]
        lines += [f"  {_gib(share.num_bytes):>12}  {share.name}" for share in self.shares]
        return "\n".join([*lines, f"  {_gib(self.total_bytes):>12}  together"])


def plan_memory(settings: EngineOptions) -> MemoryPlan:
    """What an executor with these settings would hold on each device, with as many models in training as it keeps there and every option as
    asked for. Loads nothing, but compiles the training program."""
    use_compilation_cache(settings)
    model, available = served_model(settings), device_memory.free_bytes(settings)
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
        shares=(
            MemoryItem(
                name=f"base weights, {dtype.name}",
                num_bytes=bytes_per_device(param_shapes(config, dtype)),
                lower="dtype=bfloat16" if dtype.itemsize > 2 else "",
            ),
            MemoryItem(
                name=f"pages for keys and values of {(cache.pages - 1) * PAGE} tokens",
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
            max(programs, key=lambda share: share.num_bytes),
        ),
    )


def check_snapshots(settings: EngineOptions) -> None:
    """ConfigError when the places for sampler snapshots, which are allocated at the start, do not fit beside the base weights. Takes no
    compilation, so every start can ask."""
    model = served_model(settings)
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


def _planned_cache(model: ServedModel, available_bytes: float) -> CacheSize:
    """What is asked for, but where pages are read as they lie and no option says how many, as many as a server would find room for."""
    asked, settings = asked_cache(model), model.settings
    if settings.cache_tokens is not None or asked.copied_pages:
        return asked
    adapter = adapter_size(model.config, settings.max_lora_rank)
    of_adapters = (4 + (settings.max_loras + 1) * model.dtype.itemsize) * adapter
    held = bytes_per_device(param_shapes(model.config, model.dtype)) + of_adapters
    return fitting_cache(model, device_memory.cache_budget_bytes(model, available_bytes - held))


def _training_bytes(model: ServedModel, shape: BucketShape, remat: Remat) -> int:
    """What a training batch of that shape takes on each device beside the weights and the model: the batch itself, and whatever the
    program puts down on its way."""
    batch, config = dummy_batch(shape), model.config
    adapter = place_adapter(config, zero_adapter(config, model.settings.max_lora_rank))
    loss = select_loss(LossFn.CROSS_ENTROPY)
    lowered = forward_backward.lower(
        adapter, adapter, param_shapes(config, model.dtype), batch, loss, config=config, remat=remat
    )
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None, "XLA knows what its programs take on every backend that runs them"
    return analysis.temp_size_in_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // shape.streams


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
