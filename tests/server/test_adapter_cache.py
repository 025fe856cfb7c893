"""Sampler snapshots in LoRA slots and in host memory: lookup, pins and eviction."""

import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest

from skyrl_tx_server.errors import CapacityError, ConflictError, NotFoundError
from skyrl_tx_server.model.lora.adapter import Adapter, zero_adapter
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.sampling import adapter_cache
from skyrl_tx_server.sampling.adapter_cache import BASE_SLOT, HOST_RESERVE_BYTES, AdapterCache
from tests.fakes.tiny_model import CONFIG

ZERO_ADAPTER = zero_adapter(CONFIG, 2)
ADAPTER_BYTES = sum(leaf.nbytes for leaf in jax.tree.leaves(ZERO_ADAPTER))


def adapter(value: float) -> Adapter:
    return jax.tree.map(lambda leaf: np.full_like(leaf, value), ZERO_ADAPTER)


def open_cache(free_host_bytes: Callable[[AdapterCache], int] = lambda cache: 1 << 60) -> AdapterCache:
    """Return a cache with two LoRA slots and no checkpoints on disk."""

    def read(path: str):
        raise NotFoundError(f"no checkpoint {path}")

    cache = AdapterCache(
        CONFIG,
        max_lora_rank=2,
        slots=2,
        dtype=np.dtype(np.float32),
        read=read,
        free_host_bytes=lambda: free_host_bytes(cache),
    )
    return cache


def save(cache: AdapterCache, *names: str) -> None:
    """Save a snapshot for each name, which is a letter. All values of a snapshot are the code of its letter,
    97 for "a".
    """
    for name in names:
        cache.put(name, adapter(float(ord(name))))


def pinned_values(cache: AdapterCache, weights: str | None) -> set[float]:
    """Pin `weights` for a moment and return the distinct values of its LoRA slot."""
    slot = cache.pin(weights)
    try:
        return {
            float(value)
            for leaf in jax.tree.leaves(cache.arrays)
            for value in np.unique(np.asarray(leaf[slot]))
        }
    finally:
        cache.unpin(weights)


def test_every_snapshot_has_the_values_it_was_saved_with() -> None:
    cache = open_cache()
    save(cache, *"abcd")
    for name in "abcdba":
        assert pinned_values(cache, name) == {float(ord(name))}
    assert pinned_values(cache, None) == {0.0} and cache.pin(None) == BASE_SLOT
    assert cache.stats() == {"snapshots_on_device": 2, "snapshots_in_host_memory": 4}


def test_a_save_does_not_wait_for_the_copy_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()

    def slow_copy(tree: Adapter) -> Adapter:
        assert may_copy.wait(60)
        return to_host(tree)

    monkeypatch.setattr(adapter_cache, "to_host", slow_copy)
    cache = open_cache()
    save(cache, *"ab")
    assert pinned_values(cache, "a") == {float(ord("a"))}, "the LoRA slot can be used at once"
    may_copy.set()
    save(cache, *"cd")
    assert pinned_values(cache, "a") == {float(ord("a"))}, "loaded from the copy in host memory"


def test_saving_a_name_again_replaces_its_weights() -> None:
    cache = open_cache()
    keys = []
    for value in (1.0, 2.0, 3.0):
        cache.put("s", adapter(value))
        keys.append(cache.key("s"))
        assert pinned_values(cache, "s") == {value}
    assert len(set(keys)) == 3, "each save has its own key, so KV pages of old weights are not reused"
    save(cache, "t")
    assert {cache.pin("s"), cache.pin("t")} == {1, 2}


@pytest.mark.parametrize("name", ["s", "tinker://run/sampler_weights/s"])
def test_a_name_has_a_new_key_after_its_snapshot_is_deleted(name: str) -> None:
    cache = open_cache()
    cache.put(name, adapter(1.0))
    before = cache.key(name)
    assert cache.key(name) == before
    cache.drop(name)
    if name != "s":
        assert cache.key(name) != before, "another server may have saved other weights to this path"
    cache.put(name, adapter(2.0))
    assert cache.key(name) != before


def test_pinned_snapshots_are_neither_replaced_nor_evicted() -> None:
    cache = open_cache()
    save(cache, *"ab")
    for _ in range(2):
        cache.pin("a")
    cache.unpin("a")
    with pytest.raises(ConflictError, match="the sampler snapshot a is in use"):
        save(cache, "a")
    save(cache, *"cd")
    assert list(cache.on_device) == ["a", "d"]
    cache.pin("d")
    save(cache, "e")  # all slots are pinned, so the snapshot "e" is only in host memory
    with pytest.raises(CapacityError, match="a larger max_loras"):
        cache.pin("e")
    for name in "ad":
        cache.unpin(name)
    assert pinned_values(cache, "a") == {97.0} and pinned_values(cache, "e") == {101.0}
    assert list(cache.on_device) == ["a", "e"]


def test_a_pinned_snapshot_is_dropped_when_it_is_unpinned() -> None:
    cache = open_cache()
    save(cache, "a")
    for _ in range(2):
        cache.pin("a")
    cache.drop("a")
    cache.unpin("a")
    assert pinned_values(cache, "a") == {97.0}
    cache.unpin("a")
    assert cache.stats() == {"snapshots_on_device": 0, "snapshots_in_host_memory": 0}
    for function in (cache.pin, cache.drop):
        with pytest.raises(NotFoundError, match="a"):
            function("a")
    save(cache, "a")
    assert pinned_values(cache, "a") == {97.0}
    assert pinned_values(cache, "a") == {97.0}, "the earlier drop does not apply to the new snapshot"


def test_full_host_memory_drops_the_least_recently_used_snapshot() -> None:
    cache = open_cache(lambda cache: HOST_RESERVE_BYTES + (3 - len(cache.in_host_memory)) * ADAPTER_BYTES)
    save(cache, *"abc")
    cache.pin("a")
    for name in "bcb":
        pinned_values(cache, name)
    save(cache, "d")  # snapshot "a" is the least recently used, but it is pinned
    assert list(cache.in_host_memory) == ["a", "b", "d"]
    cache.unpin("a")
    cache.put("tinker://run/sampler_weights/e", adapter(5.0))
    assert len(cache.in_host_memory) == 3, "a tinker:// snapshot has no copy in host memory"
    for _ in range(2):
        save(cache, "d")  # replaces the earlier snapshot of this name
    assert list(cache.in_host_memory) == ["a", "b", "d"]


def test_a_snapshot_whose_first_load_failed_is_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> Adapter:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    cache = open_cache()
    with monkeypatch.context() as patch:
        patch.setattr(adapter_cache, "_write_slot", fail)
        save(cache, "a")
        with pytest.raises(RuntimeError, match="out of memory"):
            cache.pin("a")
    assert list(cache.on_device) == [] and pinned_values(cache, "a") == {97.0}
    cache.drop("a")
    assert cache.stats() == {"snapshots_on_device": 0, "snapshots_in_host_memory": 0}


def test_a_paused_sequence_keeps_a_snapshot_without_host_copy() -> None:
    free_bytes = 1 << 60
    cache = open_cache(lambda cache: free_bytes)
    save(cache, "a")
    free_bytes = 0
    save(cache, "b")  # deletes the copy of "a" in host memory
    cache.pin("a")
    cache.retain("a")
    save(cache, "c", "d")
    assert pinned_values(cache, "a") == {97.0}


def test_a_snapshot_that_is_only_on_the_device_can_be_dropped() -> None:
    cache = open_cache(lambda cache: 0)
    save(cache, *"ab")
    assert list(cache.in_host_memory) == ["b"] and pinned_values(cache, "a") == {97.0}
    cache.drop("a")
    assert list(cache.on_device) == ["b"]
