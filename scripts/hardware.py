"""Print the table of models, GPUs and commands in docs/devices.md, with the formulas of the memory plan.

    python -m scripts.hardware

The script needs no device and no weights. The memory of a training batch is an estimate for recomputed
layers, which need the least memory. For the exact memory, start a server with `dry_run=true`: it compiles the
training program and prints the memory plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from scripts.bench.gpu_models import MODELS
from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.cache_size import fitting_cache
from skyrl_tx_server.executor.device_memory import (
    COPIES_PER_MODEL,
    lora_slots_bytes,
    training_models_bytes,
    weights_bytes,
)
from skyrl_tx_server.executor.memory_division import (
    RESERVED_SHARE_OF_GPU_MEMORY,
    fixed_bytes,
    minimum_training_bytes,
    with_fitting_limits,
)
from skyrl_tx_server.model.lora.adapter import adapter_size
from skyrl_tx_server.model.model_config import ModelConfig, yarn_context
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.model.weights import check_divisible

GPUS = {"RTX 4080": 16.0, "RTX 4090": 24.0, "H100": 79.6, "H200": 140.4}
"""Memory in GiB by GPU, as nvidia-smi reports it. An A100 with 80 GB has about the memory of an H100."""
BF16 = np.dtype("bfloat16")

_QWEN25 = replace(MODELS["4b"], model_type="qwen2", num_kv_heads=2, num_heads=16)
CONFIGS: dict[str, ModelConfig] = {
    "Qwen/Qwen3-4B": MODELS["4b"],
    "Qwen/Qwen3-8B": MODELS["8b"],
    "Qwen/Qwen3-32B": MODELS["32b"],
    "Qwen/Qwen3-30B-A3B": MODELS["30b-a3b"],
    "Qwen/Qwen3-235B-A22B": replace(
        MODELS["30b-a3b"], hidden_size=4096, intermediate_size=1536, num_layers=94, num_heads=64
    ),
    "Qwen/Qwen2.5-3B-Instruct": replace(
        _QWEN25, hidden_size=2048, intermediate_size=11_008, num_layers=36, tie_word_embeddings=True
    ),
    "Qwen/Qwen2.5-7B-Instruct": replace(
        _QWEN25,
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": replace(
        MODELS["8b"],
        model_type="llama",
        vocab_size=128_256,
        intermediate_size=14_336,
        num_layers=32,
        max_position_embeddings=131_072,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model, a GPU and options of the server, which also determine the number of GPUs."""

    model: str
    gpu: str
    options: dict[str, Any] = field(default_factory=dict)


_30B, _235B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
_EIGHT = {"tensor_parallel": 4, "expert_parallel": 2}
SETUPS = (
    Setup(model="Qwen/Qwen2.5-3B-Instruct", gpu="RTX 4080"),
    Setup(model="Qwen/Qwen2.5-3B-Instruct", gpu="RTX 4090"),
    Setup(model="Qwen/Qwen3-4B", gpu="RTX 4090"),
    Setup(model="Qwen/Qwen3-4B", gpu="H100"),
    Setup(model="Qwen/Qwen3-4B", gpu="H200"),
    Setup(model="Qwen/Qwen3-4B", gpu="H200", options={"max_context_length": 131_072, "yarn": True}),
    Setup(model="Qwen/Qwen2.5-7B-Instruct", gpu="H100"),
    Setup(model="meta-llama/Llama-3.1-8B-Instruct", gpu="H100"),
    Setup(model="Qwen/Qwen3-8B", gpu="H100"),
    Setup(model="Qwen/Qwen3-8B", gpu="H200", options={"max_lora_rank": 64}),
    Setup(model="Qwen/Qwen3-32B", gpu="H200"),
    Setup(model="Qwen/Qwen3-32B", gpu="H100", options={"tensor_parallel": 4}),
    Setup(model=_30B, gpu="H200"),
    Setup(model=_30B, gpu="H100", options=_EIGHT),
    Setup(model=_235B, gpu="H200", options=_EIGHT),
)


def main() -> None:
    jax.default_backend = lambda: "gpu"  # the server selects its decode program by the backend
    print("\n".join(table()))


def table() -> list[str]:
    """Return the lines of the table. Sizes are in GiB per GPU."""
    header = ("command", "GPUs", "base weights", "adapters (one training model)", "training batch")
    header += ("KV cache (tokens)", "max_num_seqs", "max_context_length")
    rows = [[f"`{command(setup)}`", *sizes(setup)] for setup in SETUPS]
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def command(setup: Setup) -> str:
    options = dict(setup.options)
    words = ["scripts/start_skyrl_tx.sh", setup.model, options.pop("tensor_parallel", 1)]
    return " ".join([*map(str, words), *(f"{name}={str(value).lower()}" for name, value in options.items())])


def sizes(setup: Setup) -> list[str]:
    """Return the cells of a row after the command. Raises ConfigError if the KV cache does not fit."""
    settings = EngineOptions(base_model=setup.model, **setup.options)
    mesh, config = settings.mesh, CONFIGS[setup.model]
    check_divisible(config, mesh, max_num_seqs=settings.max_num_seqs or mesh.batch)
    if mesh.devices > 1:
        config = replace(config, mesh=AbstractMesh(tuple(asdict(mesh).values()), tuple(asdict(mesh))))
    if settings.yarn and settings.max_context_length is not None:
        config = yarn_context(config, settings.max_context_length)
    available = GPUS[setup.gpu] * 2**30 * settings.gpu_memory_utilization
    model = with_fitting_limits(settings, config, BF16, available)
    training = minimum_training_bytes(model)
    rest = available * (1 - RESERVED_SHARE_OF_GPU_MEMORY) - fixed_bytes(model) - training
    cache = fitting_cache(model, rest)
    if cache.pages_bytes > rest:
        raise ConfigError(f"{command(setup)}: {gib(rest)} GiB are left for the KV cache; lower cache_tokens")
    one_model = COPIES_PER_MODEL * 4 * adapter_size(config, settings.max_lora_rank)
    return [
        f"{mesh.devices} {setup.gpu}",
        gib(weights_bytes(model)),
        f"{gib(lora_slots_bytes(model) + training_models_bytes(model))} ({gib(one_model)})",
        gib(training),
        f"{gib(cache.pages_bytes)} ({(cache.pages - 1) * PAGE_SIZE * mesh.batch:,})",
        str(cache.slots * mesh.batch),
        f"{model.max_context_length:,}",
    ]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


if __name__ == "__main__":
    main()
