"""A pool of training models, which are adapters with their optimizer state. The most recently used models are
on the device, all others in host memory. A move between the device and host memory does not change the values
of a model."""

from __future__ import annotations

import jax
from flax import struct

from skyrl_tx_server.distributed.multihost import SINGLE_RANK, RankGroup
from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import CapacityError, NotFoundError
from skyrl_tx_server.model.lora.adapter import Adapter
from skyrl_tx_server.model.mesh import put, to_host
from skyrl_tx_server.training.train_step import AdamState


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingModel:
    """A training model. An operation that changes the model replaces the record by a new one."""

    lora: LoraSpec = struct.field(pytree_node=False)
    adapter: Adapter  # float32
    adam: AdamState
    mask: Adapter  # see `trainable_mask`
    gradient: Adapter | None = None  # accumulated since the last optimizer step; None: zero

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


class TrainingModelPool:
    """Training models by id, at most `max_on_device` of them on the device."""

    def __init__(self, *, max_on_device: int, ranks: RankGroup = SINGLE_RANK) -> None:
        self._limit = max_on_device
        self._ranks = ranks
        self._device: dict[str, TrainingModel] = {}  # least recently used first
        # Model id -> the model, and the shardings that its arrays had on the device.
        self._in_host_memory: dict[str, tuple[TrainingModel, object]] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._device or model_id in self._in_host_memory

    def get(self, model_id: str) -> TrainingModel:
        """Return the model, moved to the device if necessary.

        Raises NotFoundError if the id is unknown, and CapacityError if the device is full and host memory
        has no room for another model.
        """
        if model_id in self._in_host_memory:
            self._make_room()
            model, shardings = self._in_host_memory.pop(model_id)
            self._device[model_id] = put(model, shardings)
        elif model_id in self._device:
            self._device[model_id] = self._device.pop(model_id)
        else:
            raise NotFoundError(f"no model {model_id}: it was never created or was unloaded")
        return self._device[model_id]

    def put(self, model_id: str, model: TrainingModel) -> None:
        """Add a model, or replace its record. Raises CapacityError if the device is full and host
        memory has no room for another model."""
        if self._device.pop(model_id, None) is None:
            self._make_room()
        self._in_host_memory.pop(model_id, None)  # after _make_room, whose error must not lose the model
        self._device[model_id] = model

    def drop(self, model_id: str) -> None:
        """Remove a model. Raises NotFoundError if the id is unknown."""
        if self._device.pop(model_id, None) is None and self._in_host_memory.pop(model_id, None) is None:
            raise NotFoundError(f"no model {model_id}: it was never created or was unloaded")

    def stats(self) -> dict[str, object]:
        return {
            "models": len(self._device) + len(self._in_host_memory),
            "models_on_device": len(self._device),
            "models_in_host_memory": len(self._in_host_memory),
        }

    def _make_room(self) -> None:
        """Move the least recently used models to host memory until the device has room for one more."""
        while len(self._device) >= self._limit:
            model_id, model = next(iter(self._device.items()))
            if model.num_bytes > (free := self._ranks.broadcast_from_rank0(available_host_bytes)):
                raise CapacityError(
                    f"the device holds {self._limit} models (max_models), and one of them needs "
                    f"{model.num_bytes >> 20} MiB of host memory, but only {free >> 20} MiB are free; unload "
                    "a model"
                )
            self._in_host_memory[model_id] = to_host(model), _shardings(model)
            del self._device[model_id]


def _shardings(model: TrainingModel) -> object:
    """Return the shardings with which `mesh.put` moves the arrays back to the devices. Return None if the
    arrays are uncommitted, as on one device: with shardings, `mesh.put` would commit them, and JAX would
    recompile every program that was compiled for uncommitted arrays."""
    if any(leaf.committed for leaf in jax.tree.leaves(model)):
        return jax.tree.map(lambda leaf: leaf.sharding, model)
    return None


def available_host_bytes() -> int:
    """Return the memory that Linux can allocate without swapping."""
    with open("/proc/meminfo") as meminfo:
        return next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:"))
