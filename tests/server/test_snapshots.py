"""The bank of sampler adapters: which lie on the device, which in host memory, and which give way."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from skyrl_tx_server.errors import CapacityError, ConflictError, NotFoundError
from skyrl_tx_server.model.lora.adapter import Adapter, zero_adapter
from skyrl_tx_server.sampling.adapter_cache import BASE_SLOT, HOST_RESERVE_BYTES, AdapterCache
from tests.fakes.tiny_model import CONFIG

NOTHING = zero_adapter(CONFIG, 2)
EACH = sum(leaf.nbytes for leaf in jax.tree.leaves(NOTHING))


def adapter(value: float) -> Adapter:
    return jax.tree.map(lambda leaf: np.full_like(leaf, value), NOTHING)


def open_bank(free_host_bytes: Callable[[AdapterCache], int] = lambda bank: 1 << 60) -> AdapterCache:
    """With room for two on the device; the checkpoint of every tinker:// path is lost."""

    def read(path: str):
        raise NotFoundError(f"no checkpoint {path}")

    bank = AdapterCache(
        CONFIG,
        max_lora_rank=2,
        slots=2,
        dtype=np.dtype(np.float32),
        read=read,
        free_host_bytes=lambda: free_host_bytes(bank),
    )
    return bank


def save(bank: AdapterCache, *names: str) -> None:
    for name in names:
        bank.put(name, adapter(float(ord(name))))


def found(bank: AdapterCache, weights: str | None) -> set[float]:
    """What a row that samples with `weights` would be given."""
    slot = bank.pin(weights)
    try:
        return {
            float(value)
            for leaf in jax.tree.leaves(bank.arrays)
            for value in np.unique(np.asarray(leaf[slot]))
        }
    finally:
        bank.unpin(weights)


def test_every_snapshot_is_found_as_it_was_saved_whatever_lies_on_the_device() -> None:
    bank = open_bank()
    save(bank, *"abcd")
    for name in "abcdba":
        assert found(bank, name) == {float(ord(name))}
    assert found(bank, None) == {0.0} and bank.pin(None) == BASE_SLOT
    assert bank.stats() == {"snapshots_on_device": 2, "snapshots_in_host_memory": 4}


def test_a_name_saved_again_means_the_new_weights_and_takes_one_place() -> None:
    bank = open_bank()
    keys = []
    for value in (1.0, 2.0, 3.0):
        bank.put("s", adapter(value))
        keys.append(bank.key("s"))
        assert found(bank, "s") == {value}
    assert len(set(keys)) == 3, "what was computed with the old ones is not the new ones'"
    save(bank, "t")
    assert {bank.pin("s"), bank.pin("t")} == {1, 2}


def test_what_a_row_uses_is_neither_replaced_nor_evicted_and_the_longest_unused_gives_way() -> None:
    bank = open_bank()
    save(bank, *"ab")
    for _ in range(2):
        bank.pin("a")
    bank.unpin("a")
    with pytest.raises(ConflictError, match="a are being sampled from"):
        save(bank, "a")
    save(bank, *"cd")
    assert list(bank._slots) == ["a", "d"]
    bank.pin("d")
    save(bank, "e")  # no room: it is loaded when a row needs it
    with pytest.raises(CapacityError, match="raise max_loras"):
        bank.pin("e")
    for name in "ad":
        bank.unpin(name)
    assert found(bank, "a") == {97.0} and found(bank, "e") == {101.0}
    assert list(bank._slots) == ["a", "e"]


def test_a_snapshot_dropped_while_a_row_uses_it_is_forgotten_with_that_row() -> None:
    bank = open_bank()
    save(bank, "a")
    for _ in range(2):
        bank.pin("a")
    bank.drop("a")
    bank.unpin("a")
    assert found(bank, "a") == {97.0}
    bank.unpin("a")
    assert bank.stats() == {"snapshots_on_device": 0, "snapshots_in_host_memory": 0}
    for forgotten in (bank.pin, bank.drop):
        with pytest.raises(NotFoundError, match="a"):
            forgotten("a")
    save(bank, "a")
    assert found(bank, "a") == {97.0}
    assert found(bank, "a") == {97.0}, "it is not dropped once more"


def test_where_host_memory_is_full_as_many_as_needed_are_forgotten_longest_unused_first() -> None:
    bank = open_bank(lambda bank: HOST_RESERVE_BYTES + (3 - len(bank._in_memory)) * EACH)
    save(bank, *"abc")
    bank.pin("a")
    for name in "bcb":
        found(bank, name)
    save(bank, "d")  # a has been used for longer than any, and is still
    assert list(bank._in_memory) == ["a", "b", "d"]
    bank.unpin("a")
    bank.put("tinker://run/sampler_weights/e", adapter(5.0))
    assert len(bank._in_memory) == 3, "its copy is on disk"
    for _ in range(2):
        save(bank, "d")  # instead of itself
    assert list(bank._in_memory) == ["a", "b", "d"]


def test_a_snapshot_that_is_left_on_the_device_alone_can_be_dropped() -> None:
    bank = open_bank(lambda bank: 0)
    save(bank, *"ab")
    assert list(bank._in_memory) == ["b"] and found(bank, "a") == {97.0}
    bank.drop("a")
    assert list(bank._slots) == ["b"]
