"""A mesh of devices that share one model: its axes, the sharding of arrays, and constraints for programs.

    axis     divides                                                     and so holds
    data     the rows of a batch                                         everything else once per device
    fsdp     the rows of a batch, and each matrix                        a part of every matrix
    tensor   heads, the perceptron's width, the vocabulary               a part of every matrix and of the cache
    expert   a mixture's experts                                         some experts, and their adapters

Training gathers the matrices of a layer that `fsdp` divides before its products, because they are smaller
than the activations of its tokens. Sampling leaves matrices in place (`weight_stationary`) and sends its few
tokens.

Every device holds an adapter, except the factors of experts, which are on the devices of their experts. If
`config.mesh` is None, all functions here are the identity.

The devices may be those of several processes, as many of each: the first axes divide the processes, the last
ones each one's devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.model_config import ModelConfig

BATCH = ("data", "fsdp")
"""The axes that divide the rows of a batch."""
type Axes = str | tuple[str, ...] | None
"""What divides one axis of an array."""
VOCABULARY = PartitionSpec("tensor", "fsdp")
"""Of the embedding and the head, [V, D]."""


OLDEST_GPU = 8
"""Compute capability from which on Triton compiles."""


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def check_device() -> None:
    """ConfigError on NVIDIA's devices before Ampere, for which Triton compiles nothing: a server would start
    and fail every request."""
    device = jax.local_devices()[0]
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if on_gpu() and major.isdigit() and int(major) < OLDEST_GPU:
        raise ConfigError(
            f"{device.device_kind} has compute capability {device.compute_capability}, the kernels need {OLDEST_GPU}.0 or more (A100, "
            "RTX 30 and later); JAX_PLATFORMS=cpu runs the server without it"
        )


def make_mesh(shape: MeshShape) -> Mesh | None:
    """The first devices of every process in that shape; None for one. ConfigError when there are too few."""
    if shape.devices == 1:
        return None
    each = shape.devices // jax.process_count()
    devices = [jax.local_devices(process)[:each] for process in range(jax.process_count())]
    if any(len(own) < each for own in devices):
        found = " and ".join(str(len(own)) for own in devices)
        where = "; this machine has" if len(devices) == 1 else f", {each} of each process; they have"
        raise ConfigError(f"{shape} needs {shape.devices} devices{where} {found} ({devices[0][0].platform})")
    sizes = asdict(shape)
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def place(
    config: ModelConfig,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array on its devices from `read(part of it)`; host memory holds one device's part at a time."""
    if config.mesh is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape)))
    sharding = NamedSharding(config.mesh, spec)
    bounds = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }
    host, last, arrays = np.empty(0), None, []
    for device in sorted(bounds, key=lambda device: bounds[device]):
        if bounds[device] != last:
            last = bounds[device]
            host = read(tuple(slice(*bound) for bound in last))
        arrays.append(jax.block_until_ready(jax.device_put(host, device)))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def replicate(config: ModelConfig, array: jax.Array | np.ndarray) -> jax.Array:
    """Copy the whole array to every device."""
    return put(array, None if config.mesh is None else NamedSharding(config.mesh, PartitionSpec()))


def put(tree: Any, shardings: Any) -> Any:
    """A tree of arrays, which is the same in every process, to where `shardings` (a tree like it, one for
    all, or None) say."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put_own_parts(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        # device_put would send it round first, to see whether it is the same in every process
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put_own_parts, tree, shardings)


def to_host[Tree](tree: Tree) -> Tree:
    """The whole of a tree of arrays in host memory, in every process, all of which must ask for it."""

    def near(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        here = isinstance(leaf, np.ndarray) or leaf.is_fully_addressable or leaf.is_fully_replicated
        return leaf if here else process_allgather(leaf, tiled=True)

    # waited for first: a copy that is asked for before its array is there is handed to another thread
    return jax.device_get(jax.block_until_ready(jax.tree.map(near, tree)))


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that a tree of arrays, or of their shapes, takes on each device."""

    def of(leaf: Any) -> int:
        return (
            prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
            * leaf.dtype.itemsize
        )

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def weight_stationary(config: ModelConfig) -> ModelConfig:
    """Return the config for a program of few tokens: matrices stay on the devices where `fsdp` placed them,
    and `fsdp` divides products as `tensor` does. With gathered matrices all weights would be sent at every
    decode step."""
    return replace(config, weight_stationary=config.mesh is not None)


def gathers(config: ModelConfig) -> bool:
    """Whether `fsdp` divides matrices that must be gathered for their products."""
    return config.mesh is not None and not config.weight_stationary and config.mesh.shape["fsdp"] > 1


def gathered(
    config: ModelConfig, specs: Mapping[str, PartitionSpec], leaves: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Inside a program: matrices that lie as `specs` say without `fsdp`'s division, unless they are
    `weight_stationary`."""
    if not gathers(config):
        return dict(leaves)
    return {
        name: constrain(config.mesh, leaf, PartitionSpec(*map(_without_fsdp, specs[name])))
        for name, leaf in leaves.items()
    }


def _without_fsdp(axes: Axes) -> Axes:
    rest = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis != "fsdp")
    return rest or None


def batch_axes(config: ModelConfig, rows: int) -> Axes:
    """What divides the rows of x [rows, T, ...] where it meets matrices; all of `fsdp`'s devices have them if
    these are `weight_stationary`."""
    if config.mesh is None:
        return None
    axes = ("data",) if config.weight_stationary else BATCH
    return None if rows % prod(config.mesh.shape[axis] for axis in axes) else axes


def shard_batch(config: ModelConfig, x: jax.Array, *, features: Axes = None) -> jax.Array:
    """Inside a program: x [rows, T, n, ...] by rows, as `batch_axes` has it, and its n by `features`."""
    return constrain(config.mesh, x, PartitionSpec(batch_axes(config, x.shape[0]), None, features))


def product_by_rows(config: ModelConfig, x: jax.Array, by: str | None) -> jax.Array:
    """Inside a program: x [rows, T, outputs of a matrix] by rows, and its outputs by the axis `by`; they are
    brought together from where a matrix that is `weight_stationary` has them made."""
    made = (
        shard_batch(config, x, features=("fsdp",) if by is None else (by, "fsdp"))
        if config.weight_stationary
        else x
    )
    return shard_batch(config, made, features=by)


def keep_replicated[Tree](config: ModelConfig, tree: Tree) -> Tree:
    """Inside a program: replicate a tree of arrays on every device."""
    return jax.tree.map(lambda leaf: constrain(config.mesh, leaf, PartitionSpec()), tree)


def shard_map_over[**Inputs, Output](
    config: ModelConfig, function: Callable[Inputs, Output], in_specs: Any, out_specs: Any
) -> Callable[Inputs, Output]:
    """Return `function` as every device runs it on its shards, which the specs of inputs and outputs
    describe."""
    return jax.shard_map(function, mesh=config.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def constrain(mesh: Mesh | None, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside a program: constrain x to `spec`."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
