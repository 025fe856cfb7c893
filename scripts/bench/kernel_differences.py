"""Compare the results of compiled GPU kernels with those of Pallas' interpreter, for inputs in bfloat16.

`paged_difference` returns the largest absolute difference of the output of paged attention. `tree_difference`
compares the output and each gradient of the attention in training. For each of these arrays, it divides the
largest absolute difference by the largest absolute value of the interpreter's result, and it returns the
largest quotient. `lora_difference` returns this quotient for the products of LoRA factors, for 40 sequences
that use eight LoRA slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from skyrl_tx_server.model.attention.kv_splits import kv_splits_of
from skyrl_tx_server.model.kernels import prefix_tree_kernel
from skyrl_tx_server.model.kernels.lora_kernel import lora_delta
from skyrl_tx_server.model.kernels.paged_kernel import paged_attention
from skyrl_tx_server.model.shapes import PAGE_SIZE, BucketShape
from skyrl_tx_server.training.packing import dummy_batch


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def results[Output](function: Callable[..., Output], *arguments: object) -> tuple[Output, Output]:
    """Return the results of a function with its kernels compiled, and with its kernels interpreted."""
    compiled = jax.jit(lambda *inputs: function(*inputs))(*arguments)
    with mock.patch.object(pl, "pallas_call", partial(pl.pallas_call, interpret=True)):
        return compiled, jax.jit(lambda *inputs: function(*inputs))(*arguments)


def paged_difference() -> float:
    count, width, heads, kv_heads, head_dim = 4, 8, 32, 8, 128
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    lengths = np.array([1, 100, 300, width * PAGE_SIZE], np.int32)
    splits = kv_splits_of(tables, lengths, group=heads // kv_heads)
    pages = count * width
    arrays = (
        normal(0, count, heads, head_dim),
        normal(1, pages, kv_heads, head_dim, PAGE_SIZE),
        normal(2, pages, kv_heads, PAGE_SIZE, head_dim),
    )
    attend = partial(paged_attention, scale=head_dim**-0.5)
    compiled, interpreted = results(attend, *arrays, tables, splits, lengths)
    return float(jnp.abs(compiled - interpreted).max())


def tree_difference() -> float:
    length, heads, kv_heads, head_dim = 512, 32, 8, 128
    layout = dummy_batch(BucketShape(streams=1, length=length)).layout
    q, grad = normal(0, 1, length, heads, head_dim), normal(1, 1, length, heads, head_dim)
    k, v = normal(2, 1, length, kv_heads, head_dim), normal(3, 1, length, kv_heads, head_dim)

    def attend() -> list[jax.Array]:
        scale = head_dim**-0.5
        out, log_total = prefix_tree_kernel.forward(layout, q, k, v, scale=scale)
        return [out, *prefix_tree_kernel.backward(layout, q, k, v, out, log_total, grad, scale=scale)]

    differences = [
        jnp.abs(compiled - interpreted).max() / jnp.abs(interpreted).max()
        for compiled, interpreted in zip(*results(attend), strict=True)
    ]
    return float(max(differences))


def lora_difference() -> float:
    batch, inputs, rank, widths, num_slots = 40, 9728, 32, (2048, 512), 8
    slots = np.arange(batch, dtype=np.int32) % num_slots
    arguments = {
        "x": normal(0, batch, inputs),
        "a": normal(1, num_slots, 2, inputs, len(widths) * rank),
        "b": [normal(2 + part, num_slots, 2, rank, width) for part, width in enumerate(widths)],
        "scale": jnp.ones((num_slots, 2)),
        "slots": jnp.asarray(slots),
        "layer": jnp.int32(1),
        "order": jnp.argsort(slots),
    }
    compiled, interpreted = results(partial(lora_delta, **arguments))
    return float(jnp.abs(compiled - interpreted).max() / jnp.abs(interpreted).max())
