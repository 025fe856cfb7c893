"""The base-2 softmax of all attention implementations. The maximum is rounded up to a whole number, so that
rounding to bfloat16 does not depend on the tiles, pages and order in which keys are read.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
MASKED = -1e30
"""The score of a key that is not visible."""


def ceil_max(scores: jax.Array) -> jax.Array:
    """Return the maximum of base-2 scores over the last axis, rounded up. Another whole number only scales
    the weights by a power of two."""
    return jnp.ceil(scores.max(axis=-1))
