"""LoRA arithmetic: the factors of a projection, and the deltas that are added to its output.

In training, one adapter is applied to the whole batch. In sampling, several adapters are stacked in LoRA
slots, and each sequence may use a different slot. The result of a sequence does not depend on the other
sequences, except for the last bits on a GPU:

- For one token per sequence on one GPU (in decode steps, and in the output head when prefill samples first
  tokens), a kernel reads the factors of the slots in use in place (`lora_kernel`).
- For routed experts, each tile of tokens has one slot (`experts.mix_experts`).
- For `kv_b` of latent attention on a GPU, `apply_lora` computes one slot after the other, also with one token
  per sequence. It always computes the number of slots for which the program is compiled.
- In all other cases, every slot in use is applied to the whole batch, and each sequence keeps only the result
  of its slot. A slot is read once, regardless of the number of sequences that use it. All products have the
  shape of the batch. On a CPU, a loop runs over the slots in use, and the number of these slots is an input
  of the program (`apply_lora`). On a GPU, such a loop would wait for the host after every projection.
  Programs for GPUs are therefore compiled for one slot, for SEVERAL slots and for all slots. The factors of
  these slots are concatenated, and a mask selects the result of each sequence's slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.scipy.linalg import block_diag

from skyrl_tx_server.model.kernels.lora_kernel import lora_delta
from skyrl_tx_server.model.mesh import on_gpu, shard_batch, shard_product
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import bucket

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
    order: ArrayLike | None = None
    """[B] int32, a permutation of the sequences in which those of a slot are adjacent. None: not computed."""


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


def lora_indices(slots_B: np.ndarray, *, counts: Sequence[int] | None = None) -> LoraIndices:
    """Return the indices of the sequences' LoRA slots, in host memory. `counts` are the values of `max_loras`
    for which programs are compiled, in ascending order. The first value that is at least the number of slots
    in use is selected. None: `max_loras` and `order` are None.

    >>> [lora_indices(np.arange(8) % used, counts=(1, 4, 8)).max_loras for used in (1, 2, 5)]
    [1, 4, 8]
    >>> lora_indices(np.array([2, 0, 2, 0]), counts=(1, 4)).order
    array([1, 3, 0, 2], dtype=int32)
    """
    distinct = np.unique(slots_B).astype(np.int32)
    return LoraIndices(
        slots=slots_B.astype(np.int32),
        distinct=np.pad(distinct, (0, len(slots_B) - len(distinct)), mode="edge"),
        count=np.array(len(distinct), np.int32),
        max_loras=None if counts is None else bucket(len(distinct), counts),
        order=None if counts is None else np.argsort(slots_B, kind="stable").astype(np.int32),
    )


def adapter_counts(config: ModelConfig, num_lora_slots: int, *, decodes: bool) -> tuple[int, ...] | None:
    """Return the values of `LoraIndices.max_loras` for which a prefill program or, with `decodes`, a decode
    program is compiled on a GPU: 1, SEVERAL and `num_lora_slots`. None: on other devices, programs do not
    depend on the number of slots in use.

    SEVERAL is left out for decode programs on one GPU: their kernel reads only the slots in use, so a smaller
    `max_loras` would not make them faster. With latent attention, SEVERAL is kept, because `apply_lora`
    computes the deltas of `kv_b` for all `max_loras` slots.
    """
    if not on_gpu():
        return None
    reads_in_place = decodes and config.mesh is None and config.latent is None
    counts = (1, num_lora_slots) if reads_in_place else (1, SEVERAL, num_lora_slots)
    return tuple(sorted({min(count, num_lora_slots) for count in counts}))


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
    # decode dispatch (a program call of several decode steps) and not in every decode step. Most batches use
    # only one slot.
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
    if module is not None and on_gpu() and config.mesh is None:
        # On a GPU, XLA adds one delta of all parts as a step of the matrix product with `weight`. If there
        # were one delta for each part, XLA would copy each part.
        if uses_decode_kernel(config, x, module):
            return split_parts(fused + decode_delta(x, module), widths, 1)
        if module.indices is None or module.indices.max_loras == 1:
            return split_parts(fused + _joined_delta(x, module), widths, 1)
    outputs = split_parts(fused, widths, 1 if by is None else config.tensor_shards)
    if module is None:
        return outputs
    deltas = low_rank_deltas(x, module, inputs_first=config.inputs_first)
    return tuple(output + delta for output, delta in zip(outputs, deltas, strict=True))


def uses_decode_kernel(config: ModelConfig, x: jax.Array, module: LoraWeights) -> bool:
    """Return whether `decode_delta` computes the delta. It does so on one GPU for LoRA slots and one token
    per sequence: in decode steps, and in the output head when prefill samples first tokens."""
    return on_gpu() and config.mesh is None and module.indices is not None and x.shape[1] == 1


def decode_delta(x: jax.Array, module: LoraWeights) -> jax.Array:
    """Return the delta [B, 1, sum(out_part)] of the LoRA slots of the sequences for x [B, 1, in]. A kernel
    reads the factors in place."""
    indices = module.indices
    assert indices is not None
    a, b, scale = jnp.asarray(module.a), [jnp.asarray(part) for part in module.b], jnp.asarray(module.scale)
    if module.layer is None:
        a, b, scale = a[:, None], [part[:, None] for part in b], scale[:, None]
    delta = lora_delta(
        x[:, 0],
        a,
        b,
        scale,
        slots=jnp.asarray(indices.slots),
        layer=jnp.asarray(0 if module.layer is None else module.layer, jnp.int32),
        order=None if indices.order is None else jnp.asarray(indices.order),
        one_slot=indices.max_loras == 1,
    )
    return delta[:, None]


def _joined_delta(x: jax.Array, module: LoraWeights) -> jax.Array:
    """Return the delta [B, T, sum(out_part)] of one adapter for x [B, T, in], computed by two products. The
    factors A and B have gradients, the scale has none."""
    at: tuple[ArrayLike, ...] = ()
    if module.indices is not None:
        slot = jnp.asarray(module.indices.distinct)[0]
        at = (slot,) if module.layer is None else (slot, module.layer)
    scale = jax.lax.stop_gradient(jnp.asarray(module.scale)[at])
    b = block_diag(*[jnp.asarray(part)[at] for part in module.b]) * scale
    inner = _product(x, jnp.asarray(module.a)[at].astype(x.dtype))
    return _product(inner, b.astype(x.dtype))


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
    layout do not depend on the number of rows (see `weight_layout.py`). If it is False and x has one token
    per sequence, the factors of LoRA slots are transposed on a CPU (see `_product_by_output`).
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
    inner = jnp.einsum("bti,nir->btnr", x, a) * scale[:, None]
    # A multiplication by a mask would give NaN if the product of another slot is infinite.
    inner = jnp.where(uses_slot[:, None, :, None], inner, 0)
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
    the gradient of the output. With JAX's default gradient, XLA on a CPU would always transpose the gradient
    of the output. In products with B, this is the wider array, and its transposition would take two to three
    times as long as the product and its gradients.
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
