"""Constants of every softmax over keys. Weights are powers of two relative to a whole number, so that they
round alike in bfloat16 in whatever tiles, pages and order the keys are read.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
MASKED = -1e30
"""The score of a key that is not seen."""


def ceil_max(scores: jax.Array) -> jax.Array:
    """Each row's highest of scores to the base of two, rounded up. Another maximum changes weights by a power
    of two."""
    return jnp.ceil(scores.max(axis=-1))
