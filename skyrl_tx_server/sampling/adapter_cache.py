"""The sampler's adapters: a device bank of immutable copies, with host memory and disk behind it.

Slot 0 is the base model. A snapshot is a copy made when it is saved, so training never touches it. A slot in use by a running row is
pinned; otherwise the least recently used one makes room, and its snapshot comes back from host memory (an ephemeral one) or from disk
(a tinker:// path). A trainer makes an ephemeral one every step and cannot drop it before its session ends: where host memory has no room
for another, those unused for longest are forgotten.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.errors import CapacityError, ConflictError, NotFoundError, UserError
from skyrl_tx_server.files.checkpoints import CheckpointInfo, CheckpointKind, is_on_disk, parse_path
from skyrl_tx_server.model.lora.adapter import Adapter, keep_adapter, place_adapter, zero_adapter
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.weights import adapter_from_arrays

logger = logging.getLogger(__name__)

BASE_SLOT = 0
HOST_RESERVE_BYTES = 1 << 30
"""Of host memory that snapshots leave to everything else."""

type SnapshotKey = tuple[str | None, int]
"""A name and how often it has been saved: equal keys mean equal weights."""
type ReadCheckpoint = Callable[[str], tuple[CheckpointInfo, dict[str, np.ndarray]]]


class AdapterCache:
    """Which snapshot lies in which slot, and the arrays themselves (`arrays`: every leaf [slots + 1, ...])."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_lora_rank: int,
        slots: int,
        dtype: np.dtype,
        read: ReadCheckpoint,
        free_host_bytes: Callable[[], int],
    ) -> None:
        self._config = config
        self._free_host_bytes = free_host_bytes
        self._max_lora_rank = max_lora_rank
        self._read = read
        self._in_memory: dict[
            str, Adapter
        ] = {}  # host copies of ephemeral snapshots, least recently used first
        self._slots: dict[str, int] = {}  # least recently used first
        self._free = list(range(slots, BASE_SLOT, -1))
        self._pins: Counter[str] = Counter()
        self._kept: Counter[str] = (
            Counter()
        )  # by paused rows: what they go on with must stay as it is, on the device or not
        self._saves: Counter[str] = Counter()
        self._dropped: set[str] = set()  # to be forgotten once unpinned
        empty = zero_adapter(config, max_lora_rank)
        self.arrays: Adapter = place_adapter(
            config,
            jax.tree.map(lambda leaf: np.zeros((slots + 1, *leaf.shape), _bank_dtype(leaf, dtype)), empty),
        )

    @property
    def num_entries(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def put(self, weights: str, adapter: Adapter) -> None:
        """Copy a training adapter; it is sampleable under `weights` from now on."""
        if self._is_used(weights):
            raise ConflictError(
                f"sampler weights {weights} are being sampled from and cannot be replaced; save under another name"
            )
        if weights in self._slots:
            self._evict(weights)
        if not is_on_disk(weights):
            self._keep(weights, to_host(adapter))
        self._saves[weights] += 1
        slot = self._make_room()
        if slot is not None:  # else every slot is in use: it is loaded when a row needs it
            self._load(weights, adapter, slot)

    def key(self, weights: str | None) -> SnapshotKey:
        return weights, 0 if weights is None else self._saves[weights]

    def pin(self, weights: str | None) -> int:
        """The bank slot of `weights`, kept there until `unpin`. CapacityError: every slot is in use. NotFoundError: it was never saved."""
        if weights is None:
            return BASE_SLOT
        if weights in self._in_memory:
            self._in_memory[weights] = self._in_memory.pop(weights)
        if weights in self._slots:
            self._slots[weights] = self._slots.pop(weights)
        else:
            adapter = self._fetch(weights)
            slot = self._make_room()
            if slot is None:
                raise CapacityError(
                    f"{len(self._slots)} sampler snapshots are in use at once, no room for another; raise max_loras"
                )
            self._load(weights, adapter, slot)
        self._pins[weights] += 1
        return self._slots[weights]

    def unpin(self, weights: str | None) -> None:
        if weights is None:
            return
        self._pins[weights] -= 1
        self._drop_if_unused(weights)

    def keep(self, weights: str | None) -> None:
        """A row that has pinned `weights` is paused: the bank slot may go to others, the weights stay."""
        if weights is not None:
            self._kept[weights] += 1
            self._pins[weights] -= 1

    def leave(self, weights: str | None) -> None:
        """A paused row goes on, with a pin of its own, or is over."""
        if weights is not None:
            self._kept[weights] -= 1
            self._drop_if_unused(weights)

    def _is_used(self, weights: str) -> bool:
        return bool(self._pins[weights] or self._kept[weights])

    def _drop_if_unused(self, weights: str) -> None:
        if not self._is_used(weights):
            del self._pins[weights], self._kept[weights]
            if weights in self._dropped:
                self.drop(weights)

    def drop(self, weights: str) -> None:
        """Forget an in-memory snapshot, as soon as no row uses it. NotFoundError when there is none."""
        if weights not in self._in_memory and weights not in self._slots:
            raise NotFoundError(f"no sampler snapshot {weights}")
        if self._is_used(weights):
            self._dropped.add(weights)
            return
        self._dropped.discard(weights)
        self._in_memory.pop(weights, None)
        if weights in self._slots:
            self._evict(weights)

    def stats(self) -> dict[str, object]:
        return {"snapshots_on_device": len(self._slots), "snapshots_in_host_memory": len(self._in_memory)}

    def _keep(self, weights: str, copy: Adapter) -> None:
        needed = HOST_RESERVE_BYTES + sum(leaf.nbytes for leaf in jax.tree.leaves(copy))
        self._in_memory.pop(weights, None)
        for unused in [other for other in self._in_memory if not self._is_used(other)]:
            if self._free_host_bytes() >= needed:
                break
            logger.warning("forgot the sampler snapshot %s: host memory has no room for another", unused)
            del self._in_memory[unused]
        self._in_memory[weights] = copy

    def _fetch(self, weights: str) -> Adapter:
        if weights in self._in_memory:
            return self._in_memory[weights]
        if not is_on_disk(weights):
            raise NotFoundError(
                f"no sampler weights {weights}: they were never saved, freed with their session, or forgotten for want of host memory"
            )
        _, kind, _ = parse_path(weights)
        if kind is not CheckpointKind.SAMPLER:
            raise UserError(
                f"{weights} is a training checkpoint; sample from one made by save_weights_for_sampler"
            )
        info, arrays = self._read(weights)
        return adapter_from_arrays(arrays, self._config, info.lora, self._max_lora_rank)

    def _make_room(self) -> int | None:
        if not self._free:
            unused = next((weights for weights in self._slots if not self._pins[weights]), None)
            if unused is None:
                return None
            self._evict(unused)
        return self._free[-1]

    def _load(self, weights: str, adapter: Adapter, slot: int) -> None:
        self.arrays = _write_slot(
            self.arrays, place_adapter(self._config, adapter), np.int32(slot), config=self._config
        )
        self._free.remove(slot)
        self._slots[weights] = slot

    def _evict(self, weights: str) -> None:
        self._free.append(self._slots.pop(weights))


@partial(jax.jit, static_argnames=("config",))
def _write_slot(bank: Adapter, adapter: Adapter, slot: np.ndarray, *, config: ModelConfig) -> Adapter:
    """Not donated: a failed copy must not take the snapshots of running samples with it."""
    return keep_adapter(
        config,
        jax.tree.map(lambda leaf, new: leaf.at[slot].set(jnp.asarray(new).astype(leaf.dtype)), bank, adapter),
    )


def _bank_dtype(leaf: np.ndarray, dtype: np.dtype) -> np.dtype:
    """Matrices in the model's dtype, scales in float32."""
    return np.dtype(dtype) if leaf.ndim >= 2 else leaf.dtype
