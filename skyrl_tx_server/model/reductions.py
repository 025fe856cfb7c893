"""Sums over the last axis whose bits do not depend on the number of rows.

On a CPU, XLA computes small sums in an order that depends on the number of rows. The logprobs of a sequence
would then depend on the width of the decode batch and on the other prompts of its prefill batch. A matrix
product computes each row in the same order if the number of rows is a multiple of four and the product has at
least 16 columns, so these functions multiply with columns of ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from skyrl_tx_server.model.mesh import on_gpu

COLUMNS = 16
"""The number of columns of ones. With one column, the order of summation depends on the number of rows. With
eight columns, it changes at 96 rows."""


def sum_last(x: jax.Array) -> jax.Array:
    """Return the sum [..., 1] of x [..., n] float32."""
    if on_gpu():
        return x.sum(axis=-1, keepdims=True)
    ones = jnp.ones((x.shape[-1], COLUMNS), x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)[..., :1]


def logsumexp(x: jax.Array) -> jax.Array:
    """Return the log of the sum of exponentials [..., 1] of x [..., n] float32."""
    highest, weights = _exponentials(x)
    return highest + jnp.log(sum_last(weights))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax of x [..., n] float32."""
    _, weights = _exponentials(x)
    return weights / sum_last(weights)


def _exponentials(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the maximum [..., 1], the exponentials [..., n] of x minus the maximum)."""
    highest = jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    distances = x - highest
    if not on_gpu():  # if XLA fused these operations, the bits would depend on the number of rows
        distances = jax.lax.optimization_barrier(distances)
    return highest, jnp.exp(distances)
