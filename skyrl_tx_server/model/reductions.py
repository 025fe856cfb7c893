"""Sums over the last axis. On a CPU with jax 0.11, their bits do not depend on the number of rows if
it is a multiple of four.

On a CPU, XLA computes small sums in an order that depends on the number of rows. The logprobs of a sequence
would then depend on the width of the decode batch and on the other prompts of its tile batch. A matrix
product computes each row in the same order if the number of rows is a multiple of four and the product has at
least 16 columns. On a CPU, these functions therefore multiply by a matrix of ones with 16 columns. On a GPU,
they use XLA's sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from skyrl_tx_server.model.mesh import on_gpu

COLUMNS = 16
"""The number of columns of the matrix of ones. With one column, the order of summation depends on the number
of rows. With eight columns, it changes at 96 rows."""


def sum_last(x: jax.Array) -> jax.Array:
    """Return the sum [..., 1] of x [..., n] float32 over the last axis."""
    if on_gpu():
        return x.sum(axis=-1, keepdims=True)
    ones = jnp.ones((x.shape[-1], COLUMNS), x.dtype)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)[..., :1]


def logsumexp(x: jax.Array) -> jax.Array:
    """Return the log of the sum of exponentials [..., 1] of x [..., n] float32 over the last axis."""
    maximum, exponentials = _exponentials(x)
    return maximum + jnp.log(sum_last(exponentials))


def softmax(x: jax.Array) -> jax.Array:
    """Return the softmax [..., n] of x [..., n] float32 over the last axis."""
    _, exponentials = _exponentials(x)
    return exponentials / sum_last(exponentials)


def _exponentials(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the maximum [..., 1], the exponentials [..., n] of x minus the maximum)."""
    maximum = jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    differences = x - maximum
    if not on_gpu():
        # If XLA fused the subtraction and the exponential, the bits would depend on the number of rows.
        differences = jax.lax.optimization_barrier(differences)
    return maximum, jnp.exp(differences)
