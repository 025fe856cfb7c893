"""The mesh of devices that share one model: its axes, the sharding of arrays, and sharding constraints.

    axis     divides                                   each device holds
    data     the sequences of a batch                  the whole model and a share of the KV pages
    fsdp     the sequences of a batch, each matrix     a part of every matrix and a share of the KV pages
    tensor   heads, the width of MLPs, the vocabulary  a part of every matrix and of every KV page
    expert   experts                                   some experts and their adapters

Before the products of a layer, training gathers the matrices that `fsdp` divides, because they are smaller
than the activations of the layer's tokens. Sampling leaves matrices in place (`weight_stationary`) and sends
the activations of its few tokens.

Norms, routers and adapters are replicated on every device, except the LoRA factors of routed experts, which
are on the devices of their experts. If `config.mesh` is None, there is one device and no array is sharded.

Several processes may share a mesh, each with the same number of devices. The devices of a process are then
adjacent along the last axes, and the first axes extend over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from math import prod
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from skyrl_tx_server.config.engine_options import MeshShape
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.model_config import ModelConfig

BATCH = ("data", "fsdp")
"""The axes that divide the sequences of a batch."""
type Axes = str | tuple[str, ...] | None
"""The mesh axes that divide one axis of an array."""
VOCABULARY = PartitionSpec("tensor", "fsdp")
"""The sharding of the embedding and the head, [V, D]."""
MIN_COMPUTE_CAPABILITY = 8
"""The lowest major compute capability that Triton supports (Ampere)."""
MAX_HOST_BYTES = 1 << 30
"""Weights that only one GPU needs are read in blocks of at most this size. A block may be larger if it
consists of a single row. A row of stacked weights is a layer."""


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def check_device() -> None:
    """Raise ConfigError on NVIDIA GPUs before Ampere, for which Triton cannot compile the kernels."""
    device = jax.local_devices()[0]
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if on_gpu() and major.isdigit() and int(major) < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"{device.device_kind} has compute capability {device.compute_capability}; the kernels need "
            f"{MIN_COMPUTE_CAPABILITY}.0 or more (A100, RTX 30 and later); set "
            "JAX_PLATFORMS=cpu to use the CPU"
        )


def make_mesh(shape: MeshShape) -> Mesh | None:
    """Return a mesh of the first devices of every process; None for one device. Raises ConfigError if there
    are too few devices."""
    if shape.devices == 1:
        return None
    per_process = shape.devices // jax.process_count()
    devices = [jax.local_devices(process)[:per_process] for process in range(jax.process_count())]
    if any(len(local) < per_process for local in devices):
        counts = " and ".join(str(len(local)) for local in devices)
        where = (
            "; this machine has" if len(devices) == 1 else f", {per_process} per process; the processes have"
        )
        raise ConfigError(
            f"{shape} needs {shape.devices} devices{where} {counts} ({devices[0][0].platform}); use "
            "a smaller mesh"
        )
    sizes = asdict(shape)
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def place(
    config: ModelConfig,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """Create a sharded array from the parts that `read(index)` returns. Host memory holds one part at a time.
    If only one GPU needs a part, host memory holds at most about MAX_HOST_BYTES of the part."""
    if config.mesh is None:
        return _read_to_device(read, tuple(slice(0, size) for size in shape), None)
    sharding = NamedSharding(config.mesh, spec)
    bounds = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }
    host, last, arrays = np.empty(0), None, []
    for device in sorted(bounds, key=lambda device: bounds[device]):
        index = tuple(slice(*bound) for bound in bounds[device])
        if on_gpu() and list(bounds.values()).count(bounds[device]) == 1:
            arrays.append(_read_to_device(read, index, device))
            continue
        if bounds[device] != last:
            last = bounds[device]
            host = read(index)
        arrays.append(jax.block_until_ready(jax.device_put(host, device)))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_to_device(
    read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...], device: Any
) -> jax.Array:
    """Read one part of an array. On a GPU, the rows of a large part are read and sent in blocks."""
    rows, num_rows = index[0], index[0].stop - index[0].start
    if not on_gpu() or num_rows == 1:
        return jax.device_put(read(index), device)
    row = read((slice(rows.start, rows.start + 1), *index[1:]))
    step = max(1, MAX_HOST_BYTES // row.nbytes)
    if step >= num_rows:
        return jax.device_put(read(index), device)
    array = jnp.zeros((num_rows, *row.shape[1:]), row.dtype, device=device)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        block = read((slice(rows.start + first, rows.start + last), *index[1:]))
        array = jax.block_until_ready(_write_rows(array, jax.device_put(block, device), first))
    return array


@partial(jax.jit, donate_argnums=0)
def _write_rows(array: jax.Array, block: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, block, first, 0)


def replicate(config: ModelConfig, array: jax.Array | np.ndarray) -> jax.Array:
    """Copy the whole array to every device."""
    return put(array, None if config.mesh is None else NamedSharding(config.mesh, PartitionSpec()))


def put(tree: Any, shardings: Any) -> Any:
    """Copy a tree of arrays, which must be equal in every process, to the devices. `shardings` is a tree of
    shardings. With one process, it may be one sharding for all arrays, or None for the default device."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put_local_parts(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        # device_put would first send the array to all processes, to check that it is equal in each of them.
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put_local_parts, tree, shardings)


def to_host[Tree](tree: Tree) -> Tree:
    """Return a tree of arrays in host memory. With several processes, all of them must call this function."""

    def gather(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        is_local = isinstance(leaf, np.ndarray) or leaf.is_fully_addressable or leaf.is_fully_replicated
        return leaf if is_local else process_allgather(leaf, tiled=True)

    # Wait first: JAX passes the copy of an array that is not ready to another thread, which adds latency.
    return jax.device_get(jax.block_until_ready(jax.tree.map(gather, tree)))


def bytes_per_device(tree: Any) -> int:
    """Return the size in bytes of a tree of arrays or ShapeDtypeStructs on each device."""

    def leaf_bytes(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return prod(shape) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def weight_stationary(config: ModelConfig) -> ModelConfig:
    """Return the config for a program with few tokens: matrices stay on their devices, and `fsdp` divides
    the outputs of products. Gathering the matrices would send all weights at every decode step."""
    return replace(config, weight_stationary=config.mesh is not None)


def gathers(config: ModelConfig) -> bool:
    """Return whether matrices that `fsdp` divides must be gathered before their products."""
    return config.mesh is not None and not config.weight_stationary and config.mesh.shape["fsdp"] > 1


def gathered(
    config: ModelConfig, specs: Mapping[str, PartitionSpec], leaves: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Inside a program: gather matrices along `fsdp`, unless the config is `weight_stationary`. `specs` are
    the shardings of the matrices."""
    if not gathers(config):
        return dict(leaves)
    return {
        name: constrain(config.mesh, leaf, PartitionSpec(*map(_without_fsdp, specs[name])))
        for name, leaf in leaves.items()
    }


def _without_fsdp(axes: Axes) -> Axes:
    other_axes = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis != "fsdp")
    return other_axes or None


def batch_axes(config: ModelConfig, batch_size: int) -> Axes:
    """Return the mesh axes that divide the sequences of x [B, T, ...] in products with matrices. With
    `weight_stationary`, `fsdp` does not divide the sequences. Return None if there is no mesh or if the axes
    cannot divide B equally."""
    if config.mesh is None:
        return None
    axes = ("data",) if config.weight_stationary else BATCH
    return None if batch_size % prod(config.mesh.shape[axis] for axis in axes) else axes


def shard_batch(config: ModelConfig, x: jax.Array, *, features: Axes = None) -> jax.Array:
    """Inside a program: shard x [B, T, n, ...] by sequences (see `batch_axes`) and n by `features`."""
    return constrain(config.mesh, x, PartitionSpec(batch_axes(config, x.shape[0]), None, features))


def shard_product(config: ModelConfig, x: jax.Array, by: str | None) -> jax.Array:
    """Inside a program: shard x [B, T, outputs of a matrix] by sequences and the outputs by `by`. With
    `weight_stationary` the devices of `fsdp` compute parts of the outputs, which are then gathered."""
    if config.weight_stationary:
        x = shard_batch(config, x, features=("fsdp",) if by is None else (by, "fsdp"))
    return shard_batch(config, x, features=by)


def keep_replicated[Tree](config: ModelConfig, tree: Tree) -> Tree:
    """Inside a program: replicate a tree of arrays on every device."""
    return jax.tree.map(lambda leaf: constrain(config.mesh, leaf, PartitionSpec()), tree)


def shard_map_over[**Inputs, Output](
    config: ModelConfig, function: Callable[Inputs, Output], in_specs: Any, out_specs: Any
) -> Callable[Inputs, Output]:
    """Return a function that runs `function` on the shards of each device, or `function` if there is no
    mesh."""
    if config.mesh is None:
        return function
    return jax.shard_map(function, mesh=config.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnEachDevice:
    """A decorator of a function of the config and of arrays. On a mesh, each device runs the function on its
    shards of the arrays. `in_specs` has one entry for each positional argument after the config. Keyword
    arguments are not divided."""

    in_specs: tuple[PartitionSpec, ...]
    out_specs: PartitionSpec | tuple[PartitionSpec, ...]

    def __call__[**Inputs, Output](
        self, function: Callable[Concatenate[ModelConfig, Inputs], Output]
    ) -> Callable[Concatenate[ModelConfig, Inputs], Output]:
        @wraps(function)
        def run(config: ModelConfig, *arrays: Inputs.args, **options: Inputs.kwargs) -> Output:
            def to_array(leaf: Any) -> Any:
                is_static = isinstance(leaf, int) and config.mesh is None
                return leaf if is_static else jnp.asarray(leaf)

            local = partial(function, config, **options)
            run_on_shards = shard_map_over(config, local, self.in_specs, self.out_specs)
            return run_on_shards(*jax.tree.map(to_array, arrays))

        return run


def constrain(mesh: Mesh | None, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside a program: constrain x to `spec`."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
