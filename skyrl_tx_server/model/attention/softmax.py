"""The parts of the base-2 softmax that attention in training, prefill and decoding shares. The maximum is
rounded up to an integer, so that rounding the softmax weights to bfloat16 gives the same relative errors for
all orders and tile sizes in which keys are read (see `ceil_max`)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
MASKED = -1e30
"""The score of a key that is not visible."""


def ceil_max(scores: jax.Array) -> jax.Array:
    """Return the maximum of base-2 scores over the last axis, rounded up. With another integer as the
    maximum, all weights change by a power of two, so their relative rounding errors stay the same."""
    return jnp.ceil(scores.max(axis=-1))
