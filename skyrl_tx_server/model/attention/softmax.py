"""The parts of the base-2 softmax that all attention implementations of the server share. The maximum is
rounded up to an integer, so that rounding to bfloat16 does not depend on the order and the tiles in which
keys are read."""

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
