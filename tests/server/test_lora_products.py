"""The deltas of an adapter in decoding do not depend on the width of the batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from skyrl_tx_server.model.lora.lora_math import LoraWeights, lora_indices, low_rank_deltas

WIDTHS = (4, 8, 16, 48, 64, 128)


@pytest.mark.parametrize("rank", [1, 2, 6, 8, 32])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (64, 8), (48, 1536)])
def test_deltas_do_not_depend_on_the_width(rank: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(rank)
    x, a, b = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((WIDTHS[-1], 1, inputs), (1, inputs, rank), (1, rank, outputs))
    )

    @jax.jit
    def delta(x: jax.Array) -> jax.Array:
        indices = lora_indices(np.zeros(len(x), np.int32))
        slots = LoraWeights(a=a, b=(b,), scale=np.ones(1, np.float32), indices=indices)
        return low_rank_deltas(x, slots)[0]

    widest = np.asarray(delta(x))
    np.testing.assert_allclose(widest, x @ a[0] @ b[0], rtol=1e-4, atol=1e-3)
    for width in WIDTHS:
        np.testing.assert_array_equal(np.asarray(delta(x[:width])), widest[:width], err_msg=str(width))


def test_an_infinite_product_changes_no_other_sequence() -> None:
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5, 8), (3, 8, 2), (3, 2, 6)))
    a[2] = 1e38
    indices = lora_indices(np.array([0, 1, 2, 1]), counts=(1, 4))
    slots = LoraWeights(a=a, b=(b,), scale=np.full(3, 2, np.float32), indices=indices)
    deltas = np.asarray(low_rank_deltas(jax.numpy.asarray(1e4 * x), slots)[0])
    for row, slot in enumerate((0, 1, None, 1)):
        if slot is not None:
            np.testing.assert_allclose(deltas[row], 2e4 * x[row] @ a[slot] @ b[slot], rtol=1e-3)
