"""The results of a prompt do not depend on the other prompts of its batch or on its division into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx_server.engine.operations import SamplingSettings
from skyrl_tx_server.engine.sample_queue import PROMPTS_PER_PREFILL
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora.adapter import Adapter, zero_adapter
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.shapes import CPU_PREFILL, GPU_PREFILL, PAGE_SIZE, PrefillShapes
from skyrl_tx_server.model.transformer import Params, init_params
from skyrl_tx_server.sampling.prefill_batch import ChunkOutputs, PrefillChunk, PrefillLayout
from skyrl_tx_server.sampling.prefill_step import prefill
from skyrl_tx_server.sampling.sequences import SequenceState
from tests.fakes import tiny_model

CONFIG = replace(tiny_model.CONFIG, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64)
PAGES_PER_SLOT = 6
LAYOUT = PrefillLayout(
    shapes=CPU_PREFILL, num_slots=5, table_width=PAGES_PER_SLOT, max_copies=2, vocab_size=CONFIG.vocab_size
)


@cache
def weights() -> tuple[Params, Adapter]:
    """Return the weights of the base model and of three adapters."""
    rng = np.random.default_rng(0)
    return jax.jit(init_params, static_argnums=(0,))(CONFIG, jax.random.key(0)), jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=(3, *leaf.shape)).astype(np.float32) / 10),
        zero_adapter(CONFIG, 4),
    )


@cache
def tolerance() -> float:
    """Return the tolerance: 0 if the bits of a row of a matrix product do not depend on the number of rows,
    else 1e-5."""
    rng = np.random.default_rng(0)
    rows, matrix = (
        jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((256, 128), (128, 640))
    )
    product = jax.jit(jnp.matmul)
    return 0.0 if bool((product(rows[:8], matrix) == product(rows, matrix)[:8]).all()) else 1e-5


def chunk(length: int, slot: int, *, cached: int = 0, end: int | None = None) -> PrefillChunk:
    """Return a chunk with the positions from `cached` to `end` of a random prompt of `length` tokens.

    Without `end`, the chunk is the last of its prompt, and a first token is sampled.
    """
    tokens = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).astype(np.int32)
    settings = SamplingSettings(temperature=1.0, seed=slot)
    sequence = SequenceState(
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
        tables=(range(1 + slot * PAGES_PER_SLOT, 1 + (slot + 1) * PAGES_PER_SLOT),),
        copies_before=(),
        copies_after=(),
        sequences=[sequence] if end is None else (),
    )


def compute(
    cache: KVCache, chunks: Sequence[PrefillChunk], layout: PrefillLayout = LAYOUT
) -> tuple[KVCache, list[ChunkOutputs]]:
    outputs = []
    params, bank = weights()
    for batch, settings in layout.batches(chunks):
        cache, output = prefill(cache, params, bank, batch, settings, config=CONFIG, tempered=False)
        outputs.append(to_host(output))
    return cache, layout.outputs(chunks, outputs)


def new_cache() -> KVCache:
    return empty_cache(config=CONFIG, pages=1 + 5 * PAGES_PER_SLOT, dtype=np.dtype("float32"))


def written(cache: KVCache, chunk: PrefillChunk) -> tuple[np.ndarray, np.ndarray]:
    """Return the cached keys and values of all positions up to the end of a chunk, in every layer."""
    pages, length = np.array(chunk.tables[0]), chunk.length
    keys, values = np.asarray(cache.keys)[:, pages], np.asarray(cache.values)[:, pages]
    keys = keys.transpose(0, 2, 3, 1, 4).reshape(*keys.shape[:1], *keys.shape[2:4], -1)[..., :length]
    return keys, values.transpose(0, 2, 1, 3, 4).reshape(
        values.shape[0], values.shape[2], -1, values.shape[-1]
    )[:, :, :length]


def assert_same(
    actual: tuple[KVCache, PrefillChunk, ChunkOutputs], expected: tuple[KVCache, PrefillChunk, ChunkOutputs]
) -> None:
    for left, right in zip(written(*actual[:2]), written(*expected[:2]), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance())
    np.testing.assert_allclose(actual[2].logprobs, expected[2].logprobs, rtol=0, atol=tolerance())
    assert actual[2].first_tokens == expected[2].first_tokens
    np.testing.assert_allclose(actual[2].first_logprobs, expected[2].first_logprobs, rtol=0, atol=tolerance())


def test_a_prefill_takes_as_many_prompts_as_the_scheduler_offers() -> None:
    assert max(CPU_PREFILL.max_tiles, GPU_PREFILL.max_tiles) == PROMPTS_PER_PREFILL


@pytest.mark.parametrize("count", [1, 4, 5])
def test_first_tokens_do_not_depend_on_how_many_sequences_begin(count: int) -> None:
    """A batch of one tile computes the head for four sequences, or for all five slots."""
    alone = [chunk(20, slot=0)]
    sequences = [replace(alone[0].sequences[0], index=index) for index in range(5)]
    of_one = [compute(new_cache(), [replace(alone[0], sequences=[sequence])])[1][0] for sequence in sequences]
    table = alone[0].tables[0]
    several = replace(
        alone[0],
        slots=tuple(range(5 - count, 5)),
        tables=(table,) * count,
        sequences=sequences[:count],
    )
    together = compute(new_cache(), [several])[1][0]
    assert together.first_tokens == [outputs.first_tokens[0] for outputs in of_one[:count]]
    assert together.first_logprobs == [outputs.first_logprobs[0] for outputs in of_one[:count]]


def test_gpu_batches_are_compiled_for_1_4_or_all_adapters() -> None:
    """A batch of four tiles has at most four adapters. A batch of sixteen tiles has at most nine, one per
    LoRA slot, for any number of decode slots."""
    layout = replace(LAYOUT, shapes=GPU_PREFILL, num_slots=3, adapter_counts=(1, 4, 9))
    buckets = [
        (len(batch.tokens), batch.adapters.max_loras, batch.sequence_adapters.max_loras)
        for batch, _ in layout.dummy_batches()
    ]
    assert buckets == [(4, 1, 1), (4, 4, 4), (16, 1, 1), (16, 4, 4), (16, 9, 9)]
    mixed = [
        (len(batch.tokens), batch.adapters.max_loras, batch.sequence_adapters.max_loras)
        for batch, _ in layout.batches([chunk(9, 0), chunk(9, 1)])
    ]
    assert mixed == [(4, 4, 4)]


@pytest.mark.parametrize("lengths", [(50, 64, 20, 1), (130, 90, 40, 200, 30)])
def test_a_prompt_in_a_batch_gives_the_same_results_as_alone(lengths: tuple[int, ...]) -> None:
    """The prompts use up to three adapters, and a batch has one or four tiles."""
    together = [chunk(length, slot) for slot, length in enumerate(lengths)]
    cache, outputs = compute(new_cache(), together)
    for prompt, output in zip(together, outputs, strict=True):
        alone, (expected,) = compute(new_cache(), [prompt])
        assert_same((cache, prompt, output), (alone, prompt, expected))


@pytest.mark.parametrize("shapes", [CPU_PREFILL, PrefillShapes(short=1, long=2, long_from=2, max_tiles=8)])
@pytest.mark.parametrize("cut", [PAGE_SIZE, 70, 299])
def test_a_prompt_in_chunks_gives_the_same_results_as_whole(cut: int, shapes: PrefillShapes) -> None:
    layout = replace(LAYOUT, shapes=shapes)
    whole, (expected,) = compute(new_cache(), [chunk(300, 0)])
    cache, (first,) = compute(new_cache(), [chunk(300, 0, end=cut)], layout)
    rest = chunk(300, 0, cached=cut)
    cache, (second, _) = compute(cache, [rest, chunk(20, 1)], layout)
    second = replace(second, logprobs=np.concatenate([first.logprobs, second.logprobs]))
    assert_same((cache, rest, second), (whole, rest, expected))
