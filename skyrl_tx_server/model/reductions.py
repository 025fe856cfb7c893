"""Sums over the last axis whose bits do not depend on the number of rows.

On a CPU, XLA computes small sums in an order that depends on the number of rows. The logprobs of a sequence
would then depend on the width of the decode batch. A matrix product computes each row in the same order if
the number of rows is a multiple of four, so these functions multiply with columns of ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from skyrl_tx_server.model.mesh import on_gpu

COLUMNS = 8
"""The columns of ones. The order of a product with one column, which is a matrix-vector product, also depends
on the number of rows."""


def sum_last(x: jax.Array) -> jax.Array:
    """Return the sum [..., 1] of x [..., n] float32."""
    if on_gpu():
        return x.sum(axis=-1, keepdims=True)
    ones = jnp.ones((x.shape[-1], COLUMNS), x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)[..., :1]


def logsumexp(x: jax.Array) -> jax.Array:
    """Return the log of the sum of exponentials [..., 1] of x [..., n] float32."""
    highest = jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return highest + jnp.log(sum_last(jnp.exp(x - highest)))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax of x [..., n] float32."""
    weights = jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return weights / sum_last(weights)
