"""Print the table of models, GPUs and commands in docs/devices.md, computed with the server's memory plan.

    python -m scripts.hardware

The script needs no device and no weights. For a training batch the table shows only the memory of the layer
inputs, which is the minimum. A server with `dry_run=true` compiles the program and prints the whole plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from scripts.check_gpu import MODELS
from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.cache_size import fitting_cache
from skyrl_tx_server.executor.device_memory import CACHE_SHARE_OF_FREE_DEVICE_MEMORY, copied_layers_bytes
from skyrl_tx_server.executor.memory_plan import COPIES_PER_MODEL, COPIES_PER_STEP
from skyrl_tx_server.executor.resolved_model import DEFAULT_MAX_CONTEXT_LENGTH, ResolvedModel
from skyrl_tx_server.model.lora.adapter import adapter_size
from skyrl_tx_server.model.mesh import bytes_per_device
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE, train_shapes
from skyrl_tx_server.model.weights import check_divisible, param_shapes

SHARE_OF_MEMORY = 0.75
"""The share of a GPU's memory that JAX reserves. XLA_PYTHON_CLIENT_MEM_FRACTION changes it."""
GPUS = {"RTX 4090": 24.0, "H100": 79.6, "H200": 140.4}
"""Memory in GiB by GPU, as nvidia-smi reports it. An A100 with 80 GB has the memory of an H100."""
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
    """A model on a number of GPUs."""

    model: str
    gpu: str
    options: dict[str, Any] = field(default_factory=dict)


_ONE_MODEL = {"max_models": 1, "max_loras": 2}
_LARGE = {"max_models": 1, "max_context_length": 16_384}
_30B, _235B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
_EIGHT = {"tensor_parallel": 4, "expert_parallel": 2}
SETUPS = (
    Setup(model="Qwen/Qwen3-4B", gpu="RTX 4090", options=_ONE_MODEL | {"max_context_length": 8192}),
    Setup(
        model="Qwen/Qwen2.5-3B-Instruct", gpu="RTX 4090", options=_ONE_MODEL | {"max_context_length": 8192}
    ),
    Setup(model="Qwen/Qwen3-4B", gpu="H100"),
    Setup(model="Qwen/Qwen3-4B", gpu="H200", options={"max_context_length": 131_072, "yarn": True}),
    Setup(model="Qwen/Qwen2.5-7B-Instruct", gpu="H100"),
    Setup(model="meta-llama/Llama-3.1-8B-Instruct", gpu="H100"),
    Setup(model="Qwen/Qwen3-8B", gpu="H100"),
    Setup(model="Qwen/Qwen3-8B", gpu="H200", options={"max_lora_rank": 64}),
    Setup(model="Qwen/Qwen3-32B", gpu="H200", options=_LARGE | {"cache_tokens": 32_768}),
    Setup(
        model="Qwen/Qwen3-32B",
        gpu="H100",
        options={"tensor_parallel": 4} | _LARGE | {"cache_tokens": 131_072},
    ),
    Setup(model=_30B, gpu="H200", options=_ONE_MODEL),
    Setup(model=_30B, gpu="H100", options=_EIGHT),
    Setup(model=_235B, gpu="H200", options=_EIGHT | _LARGE | {"max_loras": 2, "cache_tokens": 131_072}),
)


def main() -> None:
    jax.default_backend = lambda: "gpu"  # the server selects its decode program by the backend
    print("\n".join(table()))


def table() -> list[str]:
    """Return the lines of the table. Sizes are GiB on each GPU."""
    header = ("command", "GPUs", "base weights", "adapters (one training model)", "KV cache (tokens)")
    header += ("left for a batch", "its layer inputs")
    rows = [[f"`{command(setup)}`", *sizes(setup)] for setup in SETUPS]
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def command(setup: Setup) -> str:
    options = dict(setup.options)
    words = ["scripts/start_skyrl_tx.sh", setup.model, options.pop("tensor_parallel", 1)]
    return " ".join([*map(str, words), *(f"{name}={str(value).lower()}" for name, value in options.items())])


def sizes(setup: Setup) -> list[str]:
    """Return the cells of a row after the command. Raises ConfigError if a training batch does not fit."""
    settings = EngineOptions(base_model=setup.model, **setup.options)
    mesh, config = settings.mesh, CONFIGS[setup.model]
    check_divisible(config, mesh, max_num_seqs=settings.max_num_seqs)
    if mesh.devices > 1:
        config = replace(config, mesh=AbstractMesh(tuple(asdict(mesh).values()), tuple(asdict(mesh))))
    length = settings.max_context_length or min(config.context_length, DEFAULT_MAX_CONTEXT_LENGTH)
    shapes = train_shapes(
        max_context_length=length, tokens_per_batch=settings.train_tokens_per_batch, dp_ranks=mesh.batch
    )
    model = ResolvedModel(
        settings=settings, config=config, dtype=BF16, max_context_length=length, train_shapes=shapes
    )
    available = GPUS[setup.gpu] * 2**30 * SHARE_OF_MEMORY
    weights = bytes_per_device(param_shapes(config, BF16))
    adapter = adapter_size(config, settings.max_lora_rank)
    slots = (settings.max_loras + 1) * BF16.itemsize * adapter
    adapters = slots + (settings.max_models * COPIES_PER_MODEL + COPIES_PER_STEP) * 4 * adapter
    free = available - weights - slots - 4 * adapter - copied_layers_bytes(model)
    cache = fitting_cache(model, free * CACHE_SHARE_OF_FREE_DEVICE_MEMORY)
    left = available - weights - adapters - cache.pages_bytes
    inputs = shapes.shapes[-1].length * config.num_layers * config.hidden_size * BF16.itemsize
    if left < inputs:
        raise ConfigError(
            f"{command(setup)}: {gib(left)} GiB are left for a training batch, but the layer inputs need "
            f"{gib(inputs)} GiB; lower max_context_length or cache_tokens, or use more GPUs"
        )
    return [
        f"{mesh.devices} {setup.gpu}",
        gib(weights),
        f"{gib(adapters)} ({gib(COPIES_PER_MODEL * 4 * adapter)})",
        f"{gib(cache.pages_bytes)} ({(cache.pages - 1) * PAGE_SIZE * mesh.batch:,})",
        gib(left),
        gib(inputs),
    ]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


if __name__ == "__main__":
    main()
