"""Matrix products inside Pallas kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def product(left: jax.Array, right: jax.Array, *, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Inside a kernel: contract axis `over[0]` of `left` with axis `over[1]` of `right`. The sums and the
    result are float32."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
