"""Tests of the division of a GPU's memory. test_memory_plan.py compiles the training programs."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.executor import cache_size, memory_division
from skyrl_tx_server.executor.cache_size import fitting_cache
from skyrl_tx_server.executor.memory_division import (
    RESERVED_SHARE_OF_GPU_MEMORY,
    MemoryDivision,
    divide_memory,
    fitting_model,
    fixed_bytes,
)
from skyrl_tx_server.executor.resolved_model import ResolvedModel, resolve_model
from skyrl_tx_server.model.shapes import BucketShape
from skyrl_tx_server.model.transformer import Remat
from tests.fakes.tiny_model import make_settings
from tests.server.tiny_qwen3 import FIXTURES

UNSET = {"max_models": None, "max_loras": None, "max_num_seqs": None}
BYTES_PER_TOKEN = {Remat.ACTIVATIONS: 4_000, Remat.LAYERS: 1_000}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the rules for GPUs, and replace the compilation of programs by a number of bytes per token."""

    def temporary_bytes(model: ResolvedModel, shape: BucketShape, remat: Remat) -> int:
        return shape.length * BYTES_PER_TOKEN[remat]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(memory_division, "temporary_bytes", temporary_bytes)


def settings(**changes: object) -> EngineOptions:
    return make_settings(FIXTURES / "tied", Path("unused"), **(UNSET | changes))


def divided(remaining_bytes: float, *, train_tokens_per_batch: int = 256) -> MemoryDivision:
    """Divide the memory of a GPU on which weights and adapters leave `remaining_bytes`.

    The context length is 256 tokens.
    """
    model = resolve_model(settings(train_tokens_per_batch=train_tokens_per_batch))
    return divide_memory(model, (fixed_bytes(model) + remaining_bytes) / (1 - RESERVED_SHARE_OF_GPU_MEMORY))


def test_the_kv_cache_gets_what_training_leaves() -> None:
    division = divided(5_000_000)
    assert (division.training_bytes, division.remat(256)) == (256 * 4_000, Remat.ACTIVATIONS)
    assert division.cache_bytes == pytest.approx(5_000_000 - 256 * 4_000)


def test_layers_are_recomputed_if_activations_exceed_half() -> None:
    """Training may keep its activations if they take at most half of the remaining bytes."""
    assert divided(2 * 256 * 4_000 + 1).remat(256) is Remat.ACTIVATIONS
    division = divided(2 * 256 * 4_000 - 10)
    assert (division.training_bytes, division.remat(256)) == (256 * 1_000, Remat.LAYERS)


def test_a_sequence_longer_than_a_batch_may_recompute_its_layers() -> None:
    division = divided(5_000_000, train_tokens_per_batch=128)
    assert (division.remat(128), division.remat(256)) == (Remat.ACTIVATIONS, Remat.LAYERS)
    assert division.training_bytes == 128 * 4_000


def test_no_memory_is_left_for_the_kv_cache_of_a_small_gpu() -> None:
    assert divided(10).cache_bytes == 0


def test_the_default_limits_follow_the_memory() -> None:
    def limits(available_bytes: float, **changes: object) -> tuple[int, int]:
        model = fitting_model(settings(max_lora_rank=64, **changes), available_bytes)
        return model.max_models, model.max_loras

    sizes = range(1_000_000, 20_000_000, 100_000)
    assert list(dict.fromkeys(map(limits, sizes))) == [(1, 2), (2, 4), (4, 8)]
    assert limits(sizes[0], max_models=3) == (3, 2), "an option takes precedence"


def test_the_slots_follow_the_size_of_the_kv_cache() -> None:
    model = resolve_model(settings())
    cache = fitting_cache(model, 1e12)
    assert cache.slots == 256
    pages_per_slot = cache.context_pages + 1
    slots = {
        pages_per_slot * slots: fitting_cache(model, pages_per_slot * slots * cache.page_bytes).slots
        for slots in (32, 63, 64, 127, 128, 255)
    }
    assert list(slots.values()) == [32, 32, 64, 64, 128, 128]
    assert fitting_cache(resolve_model(settings(max_num_seqs=48)), 1e12).slots == 48


def test_copied_pages_and_the_null_page_fit_into_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "decodes_in_place", lambda config: False)
    model = resolve_model(settings())
    full = fitting_cache(model, 1e12)
    pages_per_slot = full.context_pages + 1 + full.copied_pages
    for budget_pages in (2 * pages_per_slot, 2 * pages_per_slot + 1):
        cache = fitting_cache(model, budget_pages * full.page_bytes)
        assert cache.slots == (budget_pages - 1) // pages_per_slot
        assert cache.pages_bytes + cache.copy_bytes <= budget_pages * full.page_bytes
