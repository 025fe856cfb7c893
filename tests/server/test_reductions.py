"""Sums over the last axis do not depend on the number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.model.reductions import logsumexp, softmax, sum_last

ROWS = (4, 8, 12, 32, 64, 96, 128, 512, 2048)


@pytest.mark.parametrize("size", [16, 64, 100, 128, 512, 1024])
def test_rows_have_the_same_bits_in_every_batch(size: int) -> None:
    values = np.random.default_rng(size).standard_normal((ROWS[-1], size)).astype(np.float32)
    for function in (lambda x: sum_last(x * x), logsumexp, softmax):
        compiled = jax.jit(function)
        first = np.asarray(compiled(values[: ROWS[0]]))
        for rows in ROWS:
            np.testing.assert_array_equal(np.asarray(compiled(values[:rows]))[: ROWS[0]], first, str(rows))


def test_sum_last_equals_numpys_sum() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(sum_last(jnp.asarray(values)), values.sum(axis=-1, keepdims=True))
