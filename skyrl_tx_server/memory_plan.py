"""What each device will hold in memory, computed before anything is loaded: `dry_run=true` prints it and refuses what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.batching import PAGE
from skyrl_tx_server.cache_size import CacheSize
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.families import stacks_of
from skyrl_tx_server.model.lora import adapter_size
from skyrl_tx_server.model.mesh import VOCABULARY, part_size, weight_spec
from skyrl_tx_server.packing import train_shapes
from skyrl_tx_server.steps.train import chunk_entries

COPIES_PER_MODEL = 5
"""Adapter, summed gradient, the gradient of the operation under way, and Adam's two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One thing that takes memory, and which option makes it smaller."""

    name: str
    num_bytes: int
    lower: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    device: str
    available_bytes: int
    shares: tuple[Share, ...]

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


def memory_plan(
    config: ModelConfig,
    dtype: np.dtype,
    *,
    device: str,
    available_bytes: int,
    context: int,
    cache: CacheSize,
    max_lora_rank: int,
    max_models: int,
    max_snapshots: int,
    train_tokens_per_batch: int,
    activation_bytes: int,
    row_groups: int,
) -> MemoryPlan:
    """The shares of one server with as many models in training as it keeps on the device."""
    weights = part_size(config, (config.vocab_size, config.hidden_size), VOCABULARY) * (1 if config.tie_word_embeddings else 2)
    weights += config.hidden_size
    for stack in stacks_of(config):
        for weight in stack.weights.values():
            weights += part_size(config, (len(stack.layers), *weight.shape), weight_spec(weight))
    adapter = adapter_size(config, max_lora_rank)
    smaller_dtype = "dtype=bfloat16" if dtype.itemsize > 2 else ""
    budget = train_shapes(max_context_length=context, tokens_per_batch=train_tokens_per_batch, row_groups=row_groups).budget
    logits = chunk_entries(budget.entries, rows=row_groups, vocab_size=config.vocab_size) * config.vocab_size // config.tensor_shards
    return MemoryPlan(
        device=device,
        available_bytes=available_bytes,
        shares=(
            Share(name=f"base weights, {dtype.name}", num_bytes=weights * dtype.itemsize, lower=smaller_dtype),
            Share(
                name=f"pages for keys and values of {(cache.pages - 1) * PAGE} tokens",
                num_bytes=cache.pages_bytes,
                lower="cache_tokens",
            ),
            Share(
                name=f"the pages of {cache.slots} sequences of {context} tokens side by side, while they decode",
                num_bytes=cache.copy_bytes,
                lower="decode_slots or max_context_length",
            ),
            Share(
                name=f"{max_models} models in training, rank {max_lora_rank}",
                num_bytes=max_models * COPIES_PER_MODEL * 4 * adapter,
                lower="max_models or max_lora_rank",
            ),
            Share(
                name=f"{max_snapshots} sampler snapshots and the base model's place",
                num_bytes=(max_snapshots + 1) * dtype.itemsize * adapter,
                lower="max_snapshots",
            ),
            Share(name="activations of a training batch", num_bytes=activation_bytes, lower="train_tokens_per_batch"),
            Share(name="logits of a chunk of entries and their gradient", num_bytes=2 * 4 * logits, lower=""),
        ),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
