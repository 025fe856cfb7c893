"""The server's options, one flat chz class, and the narrow view the engine takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import chz


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What the executor needs to know; sizes are in tokens unless named otherwise."""

    model_dir: Path  # a resolved local directory
    base_model: str  # the org/name alias clients use
    checkpoints_dir: Path
    compilation_cache_dir: Path | None  # None: no persistent compilation cache
    dtype: str
    max_lora_rank: int
    max_context_length: int | None  # None: the model's own limit
    decode_slots: int
    decode_block: int
    train_tokens_per_batch: int
    max_snapshots: int


@chz.chz
class ServerConfig:
    """Options of `python -m skyrl_tx_server key=value ...`."""

    base_model: str = chz.field(doc="Hugging Face model directory or hub id, e.g. Qwen/Qwen3-4B or ./models/tiny")
    model_alias: str | None = chz.field(
        default=None, doc="org/name under which clients ask for the model; default: the hub id, or local/<directory name>"
    )
    host: str = chz.field(default="127.0.0.1", doc="Address to listen on")
    port: int = chz.field(default=8000, doc="Port to listen on; 0 picks a free one")
    checkpoints_dir: str = chz.field(default="./checkpoints", doc="Where tinker:// checkpoints are written")
    compilation_cache_dir: str | None = chz.field(
        default="~/.cache/skyrl_tx_server/xla", doc="JAX's persistent compilation cache; none: compile anew at every start"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="Base weights and activations; auto: float32 on CPU, bfloat16 on accelerators"
    )
    max_lora_rank: int = chz.field(default=32, doc="Largest LoRA rank a client may ask for")
    max_context_length: int | None = chz.field(default=None, doc="Largest prompt + completion in tokens; default: the model's own limit")
    decode_slots: int = chz.field(default=32, doc="Sequences decoded at once")
    decode_block: int = chz.field(default=16, doc="Decode steps per device dispatch")
    train_tokens_per_batch: int = chz.field(default=8192, doc="Padded tokens per training micro-batch")
    max_snapshots: int = chz.field(default=8, doc="Sampler snapshots kept on the device; older ones wait in host memory or on disk")
    tensor_parallel: int = chz.field(default=1, doc="Devices to shard over; only 1 so far")
    session_timeout_s: float = chz.field(default=300.0, doc="A session without heartbeat for this long is freed")
