"""Prompts are computed in whatever company: neither who is computed together nor where a prompt is cut changes a bit of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import SamplingSettings
from skyrl_tx_server.engine.scheduler import PROMPTS_PER_PREFILL
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora.adapter import zero_adapter
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.shapes import CPU_PREFILL, GPU_PREFILL, PAGE, PrefillShapes
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk, PrefillLayout, PrefillOutputs
from skyrl_tx_server.sampling.sample_step import prefill
from skyrl_tx_server.sampling.sequences import SequenceState
from tests.fakes import tiny_model

CONFIG = replace(tiny_model.CONFIG, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64)
PAGES_EACH = 6
LAYOUT = PrefillLayout(
    shapes=CPU_PREFILL, num_slots=5, table_width=PAGES_EACH, max_copies=2, vocab_size=CONFIG.vocab_size
)
PARAMS = jax.jit(init_params, static_argnums=(0,))(CONFIG, jax.random.key(0))
rng = np.random.default_rng(0)
BANK = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=(3, *leaf.shape)).astype(np.float32) / 10),
    zero_adapter(CONFIG, 4),
)


def rounding() -> float:
    """0 where XLA's products give a row the same bits whatever the number of rows; some CPUs sum in another order for few rows."""
    rows, weights = (
        jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((256, 128), (128, 640))
    )
    product = jax.jit(jnp.matmul)
    return 0.0 if bool((product(rows[:8], weights) == product(rows, weights)[:8]).all()) else 1e-5


ROUNDING = rounding()


def piece(length: int, slot: int, *, cached: int = 0, end: int | None = None) -> PrefillChunk:
    tokens = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).astype(np.int32)
    settings = SamplingSettings(temperature=1.0, seed=slot)
    row = SequenceState(
        request_id=slot,
        index=0,
        weights=None,
        adapter_slot=slot % 3,
        settings=settings,
        seed=slot,
        stop_tokens=(),
        prompt=tokens,
        max_tokens=1,
        topk=0,
    )
    return PrefillChunk(
        tokens=tokens,
        cached=cached,
        length=end or length,
        weights=None,
        adapter_slot=slot % 3,
        wants_logprobs=True,
        slots=(slot,),
        tables=(range(1 + slot * PAGES_EACH, 1 + (slot + 1) * PAGES_EACH),),
        before=(),
        after=(),
        rows=[row] if end is None else (),
    )


def compute(
    cache: KVCache, pieces: Sequence[PrefillChunk], layout: PrefillLayout = LAYOUT
) -> tuple[KVCache, list[PrefillOutputs]]:
    outputs = []
    for run, settings in layout.passes(pieces):
        cache, output = prefill(cache, PARAMS, BANK, run, settings, config=CONFIG, tempered=False)
        outputs.append(to_host(output))
    return cache, layout.outputs(pieces, outputs)


def fresh() -> KVCache:
    return empty_cache(config=CONFIG, pages=1 + 5 * PAGES_EACH, dtype=np.dtype("float32"))


def written(cache: KVCache, piece: PrefillChunk) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values of a piece's whole text, of every layer."""
    pages, length = np.array(piece.tables[0]), piece.length
    keys, values = np.asarray(cache.keys)[:, pages], np.asarray(cache.values)[:, pages]
    keys = keys.transpose(0, 2, 3, 1, 4).reshape(*keys.shape[:1], *keys.shape[2:4], -1)[..., :length]
    return keys, values.transpose(0, 2, 1, 3, 4).reshape(
        values.shape[0], values.shape[2], -1, values.shape[-1]
    )[:, :, :length]


def assert_same(
    one: tuple[KVCache, PrefillChunk, PrefillOutputs], other: tuple[KVCache, PrefillChunk, PrefillOutputs]
) -> None:
    for left, right in zip(written(*one[:2]), written(*other[:2]), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(one[2].logprobs, other[2].logprobs, rtol=0, atol=ROUNDING)
    assert one[2].first_tokens == other[2].first_tokens
    np.testing.assert_allclose(one[2].first_logprobs, other[2].first_logprobs, rtol=0, atol=ROUNDING)


def test_as_many_prompts_are_offered_as_a_turn_can_take() -> None:
    assert max(CPU_PREFILL.turn, GPU_PREFILL.turn) == PROMPTS_PER_PREFILL


def test_a_gpus_passes_are_compiled_for_one_adapter_for_several_and_for_all() -> None:
    """A pass of four blocks has four adapters at most, one of sixteen all nine of the bank, however few rows there are."""
    layout = replace(LAYOUT, shapes=GPU_PREFILL, num_slots=3, bank=9)
    found = [(len(run.tokens), run.adapters.most, run.row_adapters.most) for run, _ in layout.examples()]
    assert found == [(4, 1, 1), (4, 4, 4), (16, 1, 1), (16, 4, 4), (16, 9, 9)]
    mixed = [
        (len(run.tokens), run.adapters.most, run.row_adapters.most)
        for run, _ in layout.passes([piece(9, 0), piece(9, 1)])
    ]
    assert mixed == [(4, 4, 4)]


@pytest.mark.parametrize("lengths", [(50, 64, 20, 1), (130, 90, 40, 200, 30)])
def test_a_prompt_among_others_is_computed_as_it_is_alone(lengths: tuple[int, ...]) -> None:
    """Each under its own adapter; passes of four blocks and of one."""
    together = [piece(length, slot) for slot, length in enumerate(lengths)]
    cache, outputs = compute(fresh(), together)
    for one, own in zip(together, outputs, strict=True):
        alone, (expected,) = compute(fresh(), [one])
        assert_same((cache, one, own), (alone, one, expected))


@pytest.mark.parametrize("shapes", [CPU_PREFILL, PrefillShapes(short=1, long=2, long_from=2, turn=8)])
@pytest.mark.parametrize("cut", [PAGE, 70, 299])
def test_a_prompt_in_pieces_is_computed_as_it_is_whole(cut: int, shapes: PrefillShapes) -> None:
    layout = replace(LAYOUT, shapes=shapes)
    whole, (expected,) = compute(fresh(), [piece(300, 0)])
    cache, (first,) = compute(fresh(), [piece(300, 0, end=cut)], layout)
    rest = piece(300, 0, cached=cut)
    cache, (second, _) = compute(cache, [rest, piece(20, 1)], layout)
    second = replace(second, logprobs=np.concatenate([first.logprobs, second.logprobs]))
    assert_same((cache, rest, second), (whole, rest, expected))
