"""LoRA arithmetic: the factors of a projection, and the deltas that are added to its output.

In training, one adapter is applied to the whole batch. In sampling, each sequence may use a different LoRA
slot. Every slot in use is then applied to the whole batch, and each sequence keeps only the result of its
slot (`apply_lora`). A slot is read once, regardless of the number of sequences that use it. The result of a
sequence does not depend on the other sequences, because all products have the shape of the batch. On a CPU, a
loop runs over the slots in use, and the number of these slots is an input of the program. On a GPU, such a
loop would wait for the host after every projection. Programs for GPUs are therefore compiled for one slot,
for SEVERAL slots and for all slots. The factors of these slots are joined or concatenated, and a mask selects
the result of each sequence's slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx_server.model.kernels import low_rank_kernel
from skyrl_tx_server.model.mesh import on_gpu, shard_batch, shard_product
from skyrl_tx_server.model.model_config import ModelConfig

type ArrayLike = jax.Array | np.ndarray
"""An array on the device or in host memory."""

SEVERAL = 4


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class LoraIndices:
    """The LoRA slot of each of B sequences."""

    slots: ArrayLike  # [B] int32, the slot of each sequence
    distinct: ArrayLike  # [B] int32, the first `count` elements are the slots in use, without repetition
    count: ArrayLike  # [] int32, the number of slots in use
    max_loras: int | None = struct.field(default=None, pytree_node=False)
    """The maximum number of slots in use for which the program is compiled. None: any number."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class JoinedFactors:
    """The factors of all slots in use and of all parts of a projection, as two matrices. ((x @ a) * uses) @ b
    is the delta of the fused projection."""

    a: jax.Array  # [in, R] with R = slots * parts * max_rank
    b: jax.Array
    """[R, sum(out)], multiplied by the scales. An element is 0 if its row and its column belong to different
    parts."""
    uses: jax.Array | None
    """[B, 1, R]. In the row of a sequence, the columns of its slot are 1 and all other columns are 0. None:
    there is one slot, which all sequences use."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """The factors A and B and the scale of one projection. `scale * (x @ a_part) @ b_part` is added to the
    outputs of each part. The factors of experts have a leading axis of experts.

    With `indices`, `a`, `b` and `scale` contain all LoRA slots. They then have a leading axis of slots and,
    with `layer`, a second axis of layers.
    """

    a: ArrayLike  # [in, parts * max_rank]
    b: tuple[ArrayLike, ...]  # one matrix [max_rank, out_part] for each part
    scale: ArrayLike  # [] float32, alpha / rank; never trained
    indices: LoraIndices | None = None
    layer: ArrayLike | None = None  # [] int32, index of the layer in its stack; None: no axis of layers
    joined: JoinedFactors | None = None  # factors of the slots in use; None: not joined in advance


def lora_indices(slots_B: np.ndarray, *, num_lora_slots: int | None = None) -> LoraIndices:
    """Return the indices of the sequences' LoRA slots, in host memory. With `num_lora_slots`, `max_loras` is
    the smallest number in `adapter_count_buckets` that is at least the number of slots in use.

    >>> [lora_indices(np.arange(8) % used, num_lora_slots=9).max_loras for used in (1, 2, 5)]
    [1, 4, 8]
    >>> lora_indices(np.array([0, 1])).max_loras is None
    True
    """
    distinct = np.unique(slots_B).astype(np.int32)
    buckets = adapter_count_buckets(num_lora_slots, num_sequences=len(slots_B))
    return LoraIndices(
        slots=slots_B.astype(np.int32),
        distinct=np.pad(distinct, (0, len(slots_B) - len(distinct)), mode="edge"),
        count=np.array(len(distinct), np.int32),
        max_loras=next(size for size in buckets if size is None or size >= len(distinct)),
    )


def adapter_count_buckets(num_lora_slots: int | None, *, num_sequences: int) -> Sequence[int | None]:
    """Return the values of `LoraIndices.max_loras` for which a program with `num_sequences` sequences is
    compiled: 1, SEVERAL and `num_lora_slots`, each at most `num_sequences`. If `num_lora_slots` is None, the
    only value is None.

    >>> adapter_count_buckets(9, num_sequences=64), adapter_count_buckets(9, num_sequences=4)
    ([1, 4, 9], [1, 4])
    >>> adapter_count_buckets(None, num_sequences=64)
    [None]
    """
    if num_lora_slots is None:
        return [None]
    return sorted({1, min(SEVERAL, num_lora_slots, num_sequences), min(num_lora_slots, num_sequences)})


def apply_lora(
    module: LoraWeights, compute: Callable[[LoraWeights], tuple[jax.Array, ...]]
) -> tuple[jax.Array, ...]:
    """Return the arrays [B, ...] that `compute(module)` returns. If `module` has LoRA slots, row b is
    computed with the slot of sequence b."""
    indices = module.indices
    if indices is None:
        return compute(module)

    def select(number: jax.Array, chosen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = jnp.asarray(indices.distinct)[number]
        uses_slot = jnp.asarray(indices.slots) == slot
        return tuple(
            jnp.where(uses_slot.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(compute(_in_slot(module, slot)), chosen, strict=True)
        )

    # The factors of the first slot are read outside the loop over slots, so that they are copied once per
    # dispatch and not in every decode step. Most batches use only one slot.
    result = compute(_in_slot(module, jnp.asarray(indices.distinct)[0]))
    if indices.max_loras is None:
        return jax.lax.fori_loop(1, indices.count, select, result)
    for number in range(1, min(indices.max_loras, len(indices.distinct))):
        result = select(jnp.int32(number), result)
    return result


def _in_slot(lora_slots: LoraWeights, slot: jax.Array) -> LoraWeights:
    """Return the factors of one slot."""
    at = (slot,) if lora_slots.layer is None else (slot, lora_slots.layer)
    return LoraWeights(
        a=jnp.asarray(lora_slots.a)[at],
        b=tuple(jnp.asarray(b)[at] for b in lora_slots.b),
        scale=jnp.asarray(lora_slots.scale)[at],
    )


def project(
    config: ModelConfig,
    x: jax.Array,
    weight: jax.Array,
    widths: tuple[int, ...],
    module: LoraWeights | None,
    *,
    bias: jax.Array | None = None,
    by: str | None = None,
) -> tuple[jax.Array, ...]:
    """Return the outputs of each part of a fused projection with its adapter, for x [B, T, in].

    `weight` is [sum(widths), in], or [in, sum(widths)] with `config.inputs_first`. `module` is one adapter
    for the whole batch, or all LoRA slots with the indices of the batch. None: the base model. `by` is the
    mesh axis that divides the outputs of each part (see `layer_spec.Weight`). None: `tensor` divides the
    inputs.
    """
    # With this sharding of x, the adapter's delta has the same sharding as the product with `weight`.
    x = shard_batch(config, x, features="tensor" if by is None else None)
    form = "bti,io->bto" if config.inputs_first else "bti,oi->bto"
    fused = shard_product(config, jnp.einsum(form, x, weight), by)
    fused = fused if bias is None else fused + bias
    if module is not None and (module.joined is not None or _joins_factors(config, module)):
        assert config.mesh is None
        factors = module.joined or joined_factors(module, x.dtype)
        return split_parts(fused + _joined_delta(x, factors), widths, 1)
    outputs = split_parts(fused, widths, 1 if by is None else config.tensor_shards)
    if module is None:
        return outputs
    deltas = low_rank_deltas(x, module, inputs_first=config.inputs_first)
    return tuple(output + delta for output, delta in zip(outputs, deltas, strict=True))


def _joins_factors(config: ModelConfig, module: LoraWeights) -> bool:
    """Return whether `project` adds one delta to the fused output instead of one delta to each part. On a
    GPU, the product with `weight` adds the one delta. To add a delta to each part, XLA would copy the
    part."""
    one_slot = module.indices is None or module.indices.max_loras == 1
    return on_gpu() and config.mesh is None and one_slot


def _block_diagonal(parts: Sequence[ArrayLike]) -> jax.Array:
    """Return a block-diagonal matrix [..., len(parts) * R, sum(out_part)]. Its blocks are the matrices
    [..., R, out_part] in `parts`."""
    widths = [part.shape[-1] for part in parts]
    leading = [(0, 0)] * (parts[0].ndim - 1)
    rows = [
        jnp.pad(part, [*leading, (sum(widths[:index]), sum(widths[index + 1 :]))])
        for index, part in enumerate(parts)
    ]
    return jnp.concatenate(rows, axis=-2)


def with_joined_factors(module: LoraWeights, dtype: jnp.dtype) -> LoraWeights:
    """Return `module`, the LoRA slots of one layer, with the field `joined` in `dtype`.

    A program that applies the same slots many times joins their factors once. It then computes two products
    for each projection, regardless of the number of slots and parts.
    """
    return replace(module, joined=joined_factors(module, dtype))


def joined_factors(module: LoraWeights, dtype: jnp.dtype) -> JoinedFactors:
    """Join the factors of one adapter or, if `module` has LoRA slots, of the first `max_loras` slots in
    `indices.distinct`. The factors A and B have gradients, the scale has none."""
    indices, uses = module.indices, None
    if indices is None:
        at, num_slots = (None,), 1
    else:
        assert indices.max_loras is not None
        slots = jnp.asarray(indices.distinct)[: indices.max_loras]
        at, num_slots = (slots,) if module.layer is None else (slots, module.layer), len(slots)
        if num_slots > 1:
            is_slot = (jnp.asarray(indices.slots)[:, None] == slots) & (jnp.arange(num_slots) < indices.count)
            uses = jnp.repeat(is_slot.astype(dtype), module.a.shape[-1], axis=1)[:, None]
    a, scale = jnp.asarray(module.a)[at], jax.lax.stop_gradient(jnp.asarray(module.scale)[at])
    b = _block_diagonal([jnp.asarray(part)[at] for part in module.b])  # [slots, parts * max_rank, sum(out)]
    return JoinedFactors(
        a=a.astype(dtype).transpose(1, 0, 2).reshape(a.shape[1], -1),
        b=(b * scale[:, None, None]).astype(dtype).reshape(-1, b.shape[-1]),
        uses=uses,
    )


def _joined_delta(x: jax.Array, factors: JoinedFactors) -> jax.Array:
    if on_gpu() and x.shape[1] == 1 and low_rank_kernel.supports(factors.a, factors.b):
        uses = None if factors.uses is None else factors.uses[:, 0]
        return low_rank_kernel.low_rank_delta(x[:, 0], factors.a, factors.b, uses)[:, None]
    inner = _product(x, factors.a)
    return _product(inner if factors.uses is None else inner * factors.uses, factors.b)


def split_parts(fused: jax.Array, widths: tuple[int, ...], shards: int) -> tuple[jax.Array, ...]:
    """Split the output [..., sum(widths)] of a fused projection into its parts. The output consists of
    `shards` blocks, and each block contains an equal share of every part."""
    if shards == 1:
        return tuple(jnp.split(fused, np.cumsum(widths)[:-1], axis=-1))
    blocks = fused.reshape(*fused.shape[:-1], shards, -1)
    parts = jnp.split(blocks, np.cumsum(widths)[:-1] // shards, axis=-1)
    return tuple(part.reshape(*fused.shape[:-1], -1) for part in parts)


def low_rank_deltas(
    x: jax.Array, module: LoraWeights, *, inputs_first: bool = False
) -> tuple[jax.Array, ...]:
    """Return the deltas of an adapter for x [B, T, in], one [B, T, out_part] per part, in the dtype of x.

    The factors have the layout [inputs, outputs]. `inputs_first` states that the bits of products with this
    layout do not depend on the number of rows (see `weight_layout.py`). If it is False, decode steps on a CPU
    transpose the factors.
    """
    if module.indices is not None and module.indices.max_loras not in (None, 1):
        return _deltas_of_several(x, module, module.indices)
    decodes = module.indices is not None and x.shape[1] == 1
    product = _product_by_output if decodes and not inputs_first and not on_gpu() else _product
    return apply_lora(module, lambda weights: _deltas(x, weights, product))


def _deltas_of_several(x: jax.Array, module: LoraWeights, indices: LoraIndices) -> tuple[jax.Array, ...]:
    """Return the deltas of several slots. The factors of the slots are concatenated, so there is one product
    with A and one product with the B of each part. For each sequence, the results of other slots are
    masked."""
    slots = jnp.asarray(indices.distinct)[: indices.max_loras]
    at = (slots,) if module.layer is None else (slots, module.layer)
    a, scale = jnp.asarray(module.a)[at].astype(x.dtype), jnp.asarray(module.scale)[at].astype(x.dtype)
    uses_slot = (jnp.asarray(indices.slots)[:, None] == slots) & (jnp.arange(len(slots)) < indices.count)
    inner = jnp.einsum("bti,nir->btnr", x, a) * jnp.where(uses_slot, scale, 0)[:, None, :, None]
    parts = zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    return tuple(jnp.einsum("btnr,nro->bto", part, jnp.asarray(b)[at].astype(x.dtype)) for part, b in parts)


def _deltas(x: jax.Array, module: LoraWeights, product: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
    product = product if module.a.ndim == 2 else jax.vmap(product)
    inner = product(x, module.a.astype(x.dtype)) * jax.lax.stop_gradient(module.scale).astype(x.dtype)
    return tuple(
        product(part, b.astype(x.dtype))
        for part, b in zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    )


def _product_by_output(x: jax.Array, weight: ArrayLike) -> jax.Array:
    """Return x [B, 1, in] @ weight [in, out], computed with the transposed weight [out, in].

    On a CPU, the order of summation in a product with a narrow weight [in, out] depends on the number of
    rows of x. With a weight [out, in] of at least two rows, the order does not depend on this number. The
    result of a sequence therefore does not depend on the width of the decode batch.
    """
    by_output = jnp.asarray(weight).T
    if len(by_output) == 1:
        by_output = jnp.concatenate([by_output, by_output])
    # Without the barrier, XLA would remove the transposition.
    return jnp.einsum("bti,oi->bto", x, jax.lax.optimization_barrier(by_output))[..., : weight.shape[1]]


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x [..., in] @ weight [in, out], where `in` or `out` is a rank.

    To compute the gradient of the weight, the backward pass transposes the narrower one of two arrays: x and
    the gradient of the output. With JAX's default gradient, XLA on a CPU would transpose the wider one. This
    transposition would take two to three times as long as the product and its gradients.
    """
    return x @ weight


def _product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ weight, (x, weight)


def _product_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    summed_axes = tuple(range(x.ndim - 1))
    narrow, wide = (x, grad) if x.shape[-1] <= grad.shape[-1] else (grad, x)
    grad_weight = jax.lax.dot_general(narrow, wide, ((summed_axes, summed_axes), ((), ())))
    return grad @ weight.T, grad_weight if narrow is x else grad_weight.T


_product.defvjp(_product_forward, _product_backward)
