"""The sampler's adapters: LoRA slots on the device, backed by host memory and disk.

LoRA slot 0 is the base model. A sampler snapshot is an immutable copy of the adapter of a training model. A
snapshot is pinned to its LoRA slot while a running or preempted sequence or a prefill chunk uses it. When a
LoRA slot is needed, the least recently used snapshot without a pin is evicted. Evicted snapshots are loaded
again from host memory (in-memory snapshots) or from disk (tinker:// paths). A paused sequence, which has lost
its decode slot to another request, does not pin its snapshot, but the snapshot cannot be replaced or deleted.

A trainer saves an in-memory snapshot every step, and the Tinker API has no call that drops one. The server
drops a snapshot when its session ends. If a tenant has more than `tenant_max_snapshots`, the server drops the
least recently used ones. When host memory runs out, the cache takes the snapshots that no sequence uses, the
least recently used first, and deletes their copies in host memory. Such a snapshot is lost when it is evicted
from its LoRA slot.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.errors import CapacityError, ConflictError, NotFoundError, UserError
from skyrl_tx_server.files.checkpoint_record import CheckpointInfo, CheckpointKind, is_on_disk, parse_path
from skyrl_tx_server.model.lora.adapter import Adapter, keep_adapter, place_adapter, zero_adapter
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.weights import adapter_from_arrays

logger = logging.getLogger(__name__)

BASE_SLOT = 0
HOST_RESERVE_BYTES = 1 << 30
"""If less than this much host memory would remain free after a snapshot is stored, unused snapshots are
dropped."""

type SnapshotKey = tuple[str | None, int]
"""(name, number of the save; 0 for the base model). Equal keys mean equal weights."""
type ReadCheckpoint = Callable[[str], tuple[CheckpointInfo, dict[str, np.ndarray]]]


class AdapterCache:
    """Assigns LoRA slots to snapshots. `arrays` holds the adapters of all LoRA slots. Every leaf has the
    shape [slots + 1, ...], because LoRA slot 0 is the base model."""

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
        # in-memory snapshots, least recently used first; a thread copies them to host memory
        self.in_host_memory: dict[str, Future[Adapter]] = {}
        self._copier = ThreadPoolExecutor(1, "snapshots")
        # the LoRA slot of each snapshot on the device, least recently used first
        self.on_device: dict[str, int] = {}
        self._free_slots = list(range(slots, BASE_SLOT, -1))
        self._pins: Counter[str] = Counter()  # snapshot -> number of sequences and prefill chunks that pin it
        self._retained: Counter[str] = Counter()  # snapshot -> number of paused sequences that use it
        self._save_numbers = itertools.count(1)
        self._numbers: dict[str, int] = {}  # snapshot that can be loaded -> number of its save
        self._dropped: set[str] = set()  # snapshots to delete when no sequence uses them
        empty = zero_adapter(config, max_lora_rank)
        self.arrays: Adapter = place_adapter(
            config,
            jax.tree.map(lambda leaf: np.zeros((slots + 1, *leaf.shape), _slot_dtype(leaf, dtype)), empty),
        )

    @property
    def num_slots(self) -> int:
        """The number of LoRA slots, including the slot of the base model."""
        return jax.tree.leaves(self.arrays)[0].shape[0]

    @property
    def in_use(self) -> list[str]:
        """The snapshots that prefill chunks or running, preempted or paused sequences use."""
        return [weights for weights in {**self._pins, **self._retained} if self._is_used(weights)]

    def put(self, weights: str, adapter: Adapter) -> None:
        """Save a copy of the adapter of a training model as the snapshot with the name `weights`. Raises
        ConflictError if sequences use a snapshot of this name. If the snapshot cannot be loaded into a LoRA
        slot now, `pin` loads it later."""
        if self._is_used(weights):
            raise ConflictError(
                f"the sampler snapshot {weights} is in use and cannot be replaced; save under another name"
            )
        if weights in self.on_device:
            self._evict(weights)
        if not is_on_disk(weights):
            self._store_in_host_memory(weights, adapter)
        self._numbers[weights] = next(self._save_numbers)
        slot = self._free_slot()
        if slot is None:  # all slots are pinned
            return
        try:
            self._load(weights, adapter, slot)
        except Exception as error:  # e.g. out of memory; the save must not fail, the snapshot is stored
            if jax.process_count() > 1:  # the load may have failed on this rank only
                raise
            logger.warning("%s is saved, but not loaded into a LoRA slot yet: %s", weights, error)

    def key(self, weights: str | None) -> SnapshotKey:
        """Return the key of the latest weights that were saved as `weights`. None: the base model."""
        if weights is None:
            return weights, 0
        if weights not in self._numbers:  # another process saved this checkpoint, or it was dropped before
            self._numbers[weights] = next(self._save_numbers)
        return weights, self._numbers[weights]

    def pin(self, weights: str | None) -> int:
        """Load `weights` into a LoRA slot if necessary, reserve the slot until `unpin` or `retain`, and
        return its index. None: the base model.

        Raises CapacityError if all slots are pinned, and NotFoundError if the snapshot does not exist. Raises
        UserError if `weights` is not a sampler checkpoint, if its rank exceeds `max_lora_rank`, or if its
        tensors do not match the model.
        """
        if weights is None:
            return BASE_SLOT
        if weights in self.in_host_memory:
            self.in_host_memory[weights] = self.in_host_memory.pop(weights)
        if weights in self.on_device:
            self.on_device[weights] = self.on_device.pop(weights)
        else:
            adapter = self._fetch(weights)
            slot = self._free_slot()
            if slot is None:
                raise CapacityError(
                    f"all {len(self.on_device)} LoRA slots are in use; start the server with a larger "
                    "max_loras"
                )
            self._load(weights, adapter, slot)
        self._pins[weights] += 1
        return self.on_device[weights]

    def check_current(self, weights: str | None) -> None:
        """Raise ConflictError if a new sequence must not use the snapshot, because it is deleted as soon as
        the sequences that use it have ended."""
        if weights in self._dropped:
            raise ConflictError(
                f"{weights} was deleted or saved again, and samples of its earlier weights still run; repeat "
                "the request when they have ended"
            )

    def unpin(self, weights: str | None) -> None:
        if weights is None:
            return
        self._pins[weights] -= 1
        self._drop_if_unused(weights)

    def retain(self, weights: str | None) -> None:
        """Replace a pin by the reference of a paused sequence. The snapshot can then be evicted from its LoRA
        slot, but cannot be replaced or deleted."""
        if weights is not None:
            self._retained[weights] += 1
            self._pins[weights] -= 1

    def release(self, weights: str | None) -> None:
        """Remove a reference that `retain` added, after the snapshot has been pinned again or the sequence
        has ended."""
        if weights is not None:
            self._retained[weights] -= 1
            self._drop_if_unused(weights)

    def _is_used(self, weights: str) -> bool:
        return bool(self._pins[weights] or self._retained[weights])

    def _drop_if_unused(self, weights: str) -> None:
        if not self._is_used(weights):
            del self._pins[weights], self._retained[weights]
            if weights in self._dropped:
                self.drop(weights)

    def drop(self, weights: str) -> None:
        """Delete a snapshot as soon as no sequence uses it. For a checkpoint, this deletes the copy on the
        device, because other weights may later be saved to its path, and not the files. Raises NotFoundError
        if an in-memory snapshot is neither in host memory nor on the device."""
        if not is_on_disk(weights) and weights not in self.in_host_memory and weights not in self.on_device:
            raise NotFoundError(f"no sampler snapshot {weights}")
        if self._is_used(weights):
            self._dropped.add(weights)
            return
        self._dropped.discard(weights)
        self.in_host_memory.pop(weights, None)
        if weights in self.on_device:
            self._evict(weights)
        # Later weights with this name must get another key, because the prefix cache may contain pages of the
        # deleted weights.
        self._numbers.pop(weights, None)

    def stats(self) -> dict[str, object]:
        return {
            "snapshots_on_device": len(self.on_device),
            "snapshots_in_host_memory": len(self.in_host_memory),
        }

    def _store_in_host_memory(self, weights: str, adapter: Adapter) -> None:
        """Copy the adapter to host memory in a thread. The arrays stay on the device until the copy is
        complete. If too little host memory is free, first drop snapshots that no sequence uses. With several
        processes, wait for the copy, because all processes take part in it."""
        needed = HOST_RESERVE_BYTES + sum(leaf.nbytes for leaf in jax.tree.leaves(adapter))
        self.in_host_memory.pop(weights, None)
        for unused in [name for name in self.in_host_memory if not self._is_used(name)]:
            if self._free_host_bytes() >= needed:
                break
            logger.warning("dropped the sampler snapshot %s because host memory is full", unused)
            del self.in_host_memory[unused]
            if unused not in self.on_device:
                self._numbers.pop(unused, None)
        copy = self.in_host_memory[weights] = self._copier.submit(to_host, adapter)
        if jax.process_count() > 1:
            wait([copy])

    def _fetch(self, weights: str) -> Adapter:
        if weights in self.in_host_memory:
            return self.in_host_memory[weights].result()
        if not is_on_disk(weights):
            raise NotFoundError(
                f"no sampler snapshot {weights}: it was never saved, was freed with its session, or was "
                "dropped because host memory was full"
            )
        _, kind, _ = parse_path(weights)
        if kind is not CheckpointKind.SAMPLER:
            raise UserError(
                f"{weights} is not a sampler checkpoint; sample from the path that save_weights_for_sampler "
                "returns"
            )
        info, arrays = self._read(weights)
        return adapter_from_arrays(arrays, self._config, info.lora, self._max_lora_rank)

    def _free_slot(self) -> int | None:
        """Return a free LoRA slot. Evict a snapshot if necessary. None: all LoRA slots are in use."""
        if not self._free_slots:
            unused = next((weights for weights in self.on_device if self._may_evict(weights)), None)
            if unused is None:
                return None
            self._evict(unused)
        return self._free_slots[-1]

    def _may_evict(self, weights: str) -> bool:
        """Whether no sequence needs the snapshot in its LoRA slot: it is not pinned, and either no paused
        sequence uses it or it can be loaded again."""
        is_stored = weights in self.in_host_memory or is_on_disk(weights)
        return not self._pins[weights] and (is_stored or not self._retained[weights])

    def _load(self, weights: str, adapter: Adapter, slot: int) -> None:
        self.arrays = _write_slot(
            self.arrays, place_adapter(self._config, adapter), np.int32(slot), config=self._config
        )
        self._free_slots.remove(slot)
        self.on_device[weights] = slot

    def _evict(self, weights: str) -> None:
        self._free_slots.append(self.on_device.pop(weights))
        if weights not in self.in_host_memory and not is_on_disk(weights):
            self._numbers.pop(weights, None)  # the snapshot is lost


@partial(jax.jit, static_argnames=("config",))
def _write_slot(lora_slots: Adapter, adapter: Adapter, slot: np.ndarray, *, config: ModelConfig) -> Adapter:
    """Copy `adapter` into a LoRA slot. No argument is donated, because a failed copy must not destroy the
    snapshots of running sequences."""
    return keep_adapter(
        config,
        jax.tree.map(
            lambda leaf, new: leaf.at[slot].set(jnp.asarray(new).astype(leaf.dtype)), lora_slots, adapter
        ),
    )


def _slot_dtype(leaf: np.ndarray, dtype: np.dtype) -> np.dtype:
    """Return the dtype of a leaf in a slot: `dtype` for matrices, float32 for scales."""
    return np.dtype(dtype) if leaf.ndim >= 2 else leaf.dtype
