"""The arithmetic of LoRA: a projection's factors, and what they add to it.

In training one adapter serves a whole batch. In sampling each row may have its own, of a bank; then every adapter in use is applied to the
whole batch and each row keeps what its own one made (`apply_lora`). That reads an adapter once, however many rows use it, and a row's
result cannot depend on the others: the shapes of all products are those of the batch, whoever is in it. How many adapters are in use a
program finds out while it runs, or on a GPU, which would have to ask its host each time, it is compiled for: one, four, or all of a bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.mesh import product_by_rows, shard_batch
from skyrl_tx_server.model.model_config import ModelConfig

type ArrayLike = jax.Array | np.ndarray
"""An adapter lives on the device, or in host memory while it is made, loaded and saved."""


SEVERAL = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LoraIndices:
    """Which entry of a bank each of B rows uses."""

    entries: ArrayLike  # [B] int32, by row
    distinct: ArrayLike  # [B] int32, every entry in use once; the first `count` count
    count: ArrayLike  # [] int32
    most: int | None = field(
        default=None, metadata={"static": True}
    )  # what a program is compiled for; None: any number


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """One projection's A, B and scale: the parts' outputs gain `scale * (x @ a_part) @ b_part`. Experts give A and B a leading axis.

    With `users` it is a bank of them: every leaf has leading axes [S, ...], entries first, then layers where it has a `layer`.
    """

    a: ArrayLike  # [in, parts * max_rank]
    b: tuple[ArrayLike, ...]  # one [max_rank, out_part] each
    scale: ArrayLike  # [] float32, alpha / rank; never trained
    users: LoraIndices | None = None
    layer: ArrayLike | None = None  # [] int32


def lora_indices(entries_B: np.ndarray, *, bank: int | None = None) -> LoraIndices:
    """On the host; where it is given how many entries a `bank` holds, for a program that is compiled for one, for SEVERAL or for all.

    >>> [users_of(np.arange(8) % used, bank=9).most for used in (1, 2, 5)], users_of(np.array([0, 1])).most
    ([1, 4, 8], None)
    """
    found = np.unique(entries_B).astype(np.int32)
    distinct = np.pad(found, (0, len(entries_B) - len(found)), mode="edge")
    most = next(
        size
        for size in adapter_count_buckets(bank, rows=len(entries_B))
        if size is None or size >= len(found)
    )
    return LoraIndices(
        entries=entries_B.astype(np.int32), distinct=distinct, count=np.array(len(found), np.int32), most=most
    )


def adapter_count_buckets(bank: int | None, *, rows: int) -> Sequence[int | None]:
    """Each number of entries, of as many as a `bank` holds, for which a program over `rows` rows is compiled.

    >>> compiled_for(9, rows=64), compiled_for(9, rows=4), compiled_for(None, rows=64)
    ([1, 4, 9], [1, 4], [None])
    """
    return [None] if bank is None else sorted({1, min(SEVERAL, bank, rows), min(bank, rows)})


def apply_lora(
    module: LoraWeights, of: Callable[[LoraWeights], tuple[jax.Array, ...]]
) -> tuple[jax.Array, ...]:
    """`of` the module, which makes arrays [B, ...] of the whole batch; of a bank, each row's part of what its own entry makes."""
    users = module.users
    if users is None:
        return of(module)

    def select(index: jax.Array, chosen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        entry = jnp.asarray(users.distinct)[index]
        own = jnp.asarray(users.entries) == entry
        return tuple(
            jnp.where(own.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(of(_entry(module, entry)), chosen, strict=True)
        )

    # the first outside the loop: all decode steps of a block then read one copy of it, and mostly there is no other
    first = of(_entry(module, jnp.asarray(users.distinct)[0]))
    if users.most is None:
        return jax.lax.fori_loop(1, users.count, select, first)
    for index in range(1, min(users.most, len(users.distinct))):
        first = select(jnp.int32(index), first)
    return first


def _entry(bank: LoraWeights, entry: jax.Array) -> LoraWeights:
    at = (entry,) if bank.layer is None else (entry, bank.layer)
    return LoraWeights(
        a=jnp.asarray(bank.a)[at],
        b=tuple(jnp.asarray(b)[at] for b in bank.b),
        scale=jnp.asarray(bank.scale)[at],
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
    """x [B, T, in] through weight [sum(widths), in] plus the adapter's delta, split into the parts of a fused projection.

    `module` is one adapter for the whole batch, a bank with its users, or None for the base model. `by` is the axis that divides each part
    on a mesh; the weight's outputs are arranged for it (see `family.Weight`).
    """
    x = shard_batch(
        config, x, features="tensor" if by is None else None
    )  # or an adapter's rows would lie elsewhere than its matrix's
    fused = product_by_rows(config, jnp.einsum("bti,oi->bto", x, weight), by)
    outputs = split_parts(
        fused if bias is None else fused + bias, widths, 1 if by is None else config.tensor_shards
    )
    if module is None:
        return outputs
    return tuple(output + delta for output, delta in zip(outputs, low_rank_deltas(x, module), strict=True))


def split_parts(fused: jax.Array, widths: tuple[int, ...], shards: int) -> tuple[jax.Array, ...]:
    """The parts of a fused projection's output [..., sum(widths)], each of whose `shards` blocks holds a piece of every part."""
    if shards == 1:
        return tuple(jnp.split(fused, np.cumsum(widths)[:-1], axis=-1))
    blocks = fused.reshape(*fused.shape[:-1], shards, -1)
    parts = jnp.split(blocks, np.cumsum(widths)[:-1] // shards, axis=-1)
    return tuple(part.reshape(*fused.shape[:-1], -1) for part in parts)


def low_rank_deltas(x: jax.Array, module: LoraWeights) -> tuple[jax.Array, ...]:
    """The adapter's part of a projection of x [B, T, in], one [B, T, out_part] per part, in x's dtype."""
    if module.users is not None and module.users.most not in (None, 1):
        return _deltas_of_several(x, module, module.users)
    return apply_lora(module, lambda own: _deltas(x, own))


def _deltas_of_several(x: jax.Array, module: LoraWeights, users: LoraIndices) -> tuple[jax.Array, ...]:
    """The same with the factors of all entries side by side, as one product and one per part; a row's own entry passes between them."""
    entries = jnp.asarray(users.distinct)[: users.most]
    at = (entries,) if module.layer is None else (entries, module.layer)
    a, scale = jnp.asarray(module.a)[at].astype(x.dtype), jnp.asarray(module.scale)[at].astype(x.dtype)
    own = (jnp.asarray(users.entries)[:, None] == entries) & (jnp.arange(len(entries)) < users.count)
    inner = jnp.einsum("bti,nir->btnr", x, a) * jnp.where(own, scale, 0)[:, None, :, None]
    parts = zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    return tuple(jnp.einsum("btnr,nro->bto", part, jnp.asarray(b)[at].astype(x.dtype)) for part, b in parts)


def _deltas(x: jax.Array, module: LoraWeights) -> tuple[jax.Array, ...]:
    product = _product if module.a.ndim == 2 else jax.vmap(_product)
    inner = product(x, module.a.astype(x.dtype)) * jax.lax.stop_gradient(module.scale).astype(x.dtype)
    return tuple(
        product(part, b.astype(x.dtype))
        for part, b in zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    )


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [in, out] where one of the two is a rank.

    The weight's gradient is made of the narrower of x and the output's gradient, transposed, times the wider one. In JAX's own order XLA
    on a CPU transposes the wider one, which takes two to three times as long as all of the product and its gradients.
    """
    return x @ weight


def _product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ weight, (x, weight)


def _product_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    rows = tuple(range(x.ndim - 1))
    narrow, wide = (x, grad) if x.shape[-1] <= grad.shape[-1] else (grad, x)
    grad_weight = jax.lax.dot_general(narrow, wide, ((rows, rows), ((), ())))
    return grad @ weight.T, grad_weight if narrow is x else grad_weight.T


_product.defvjp(_product_forward, _product_backward)
