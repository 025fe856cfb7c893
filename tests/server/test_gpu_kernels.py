"""GPU kernels run in the interpreter of Pallas and are lowered for a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.stages import Wrapped

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    MAX_STOP_TOKENS,
    LossFn,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model import experts
from skyrl_tx_server.model.attention import decode_attention, prefill_attention
from skyrl_tx_server.model.attention.decode_attention import (
    TokenRows,
    attend_over_pages,
    attend_over_segments,
)
from skyrl_tx_server.model.attention.kv_splits import KVSplits, kv_splits_of
from skyrl_tx_server.model.attention.prefill_attention import PrefillTiles
from skyrl_tx_server.model.attention.prefix_tree_attention import tree_attention
from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.kernels import (
    grouped_kernel,
    paged_kernel,
    prefix_tree_kernel,
)
from skyrl_tx_server.model.kernels.lora_kernel import lora_delta
from skyrl_tx_server.model.kernels.paged_kernel import paged_attention
from skyrl_tx_server.model.kernels.rotary_kernel import normalize_and_rotate
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache, read_positions, segment_of
from skyrl_tx_server.model.layers import rms_norm, rope_tables, rotate
from skyrl_tx_server.model.lora import lora_math
from skyrl_tx_server.model.lora.adapter import zero_adapter
from skyrl_tx_server.model.lora.lora_math import (
    ArrayLike,
    LoraWeights,
    adapter_counts,
    lora_indices,
    project,
)
from skyrl_tx_server.model.model_config import Experts, RopeSpec
from skyrl_tx_server.model.shapes import PAGE_SIZE, PREFILL_TILE, BucketShape, BucketShapes
from skyrl_tx_server.model.transformer import Remat, init_params
from skyrl_tx_server.sampling import decode_batch, model_runner
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch, decode_steps
from skyrl_tx_server.sampling.sequences import batch_settings
from skyrl_tx_server.training.losses import select_loss
from skyrl_tx_server.training.packing import TrainBatch, pack
from skyrl_tx_server.training.train_step import forward_backward
from tests.fakes.tiny_model import CONFIG as TINY
from tests.fakes.tiny_model import make_model, make_settings
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import attention_spec

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
COMPILED = pl.pallas_call
PAGED_ATTENTION = jax.jit(paged_attention, static_argnames="scale")
TRITON_DEPRECATION = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in Pallas' interpreter, except in `lowered`."""
    monkeypatch.setattr(pl, "pallas_call", partial(COMPILED, interpret=True))


def packed_batch(*, seed: int, rows: int) -> TrainBatch:
    """Return a micro-batch of `rows` streams of 512 tokens, with shared prefixes and padding at the end."""
    random = np.random.default_rng(seed)
    sequences: list[np.ndarray] = []
    for length in random.integers(20, 90, 6 * rows):
        tokens = random.integers(0, 50, length)
        if sequences and random.random() < 0.5:
            tokens = np.concatenate([sequences[-1][: random.integers(16, 60)], tokens])
        sequences.append(tokens.astype(np.int32))
    data = tuple(TrainDatum(tokens=tokens, target_tokens=tokens) for tokens in sequences)
    shape = BucketShape(streams=rows, length=512)
    (batch,) = pack(
        data,
        [np.ones(len(datum.tokens), bool) for datum in data],
        BucketShapes(shapes=(shape,), budget=shape),
    )
    arrays = batch.arrays
    assert (arrays.layout.num_key_blocks[:, -1] == 0).any() and (arrays.layout.num_key_blocks > 1).any()
    return arrays


def layout_of(batch: TrainBatch) -> TreeLayout:
    return jax.tree.map(jnp.asarray, batch.layout)


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("seed", "rows", "heads", "kv_heads", "head_dim", "dtype", "tolerance"),
    [(0, 2, 4, 2, 16, "float32", 1e-5), (1, 1, 3, 1, 24, "bfloat16", 0.04)],
)
def test_tree_kernels_and_loop_have_equal_values_and_gradients(
    seed: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: str, tolerance: float
) -> None:
    layout = layout_of(packed_batch(seed=seed, rows=rows))
    q, grad_out = (normal(number, rows, 512, heads, head_dim, dtype=dtype) for number in (1, 2))
    k, v = (normal(number, rows, 512, kv_heads, head_dim, dtype=dtype) for number in (3, 4))
    expected, pull_back = jax.vjp(
        jax.jit(partial(tree_attention, tiny_qwen3.CONFIG, layout, attention_spec(head_dim))), q, k, v
    )

    scale = head_dim**-0.5

    @jax.jit
    def by_kernels(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        out, log_total = prefix_tree_kernel.forward(layout, q, k, v, scale=scale)
        return out, *prefix_tree_kernel.backward(layout, q, k, v, out, log_total, grad_out, scale=scale)

    for actual, desired in zip(by_kernels(q, k, v), (expected, *pull_back(grad_out)), strict=True):
        assert actual.dtype == desired.dtype
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(desired, np.float32), atol=tolerance, rtol=tolerance
        )


def test_a_sequence_attends_only_to_its_own_pages() -> None:
    """The batch has shared pages, a partly filled page, an unused page and an empty sequence. All positions
    outside of the sequences are NaN."""
    heads, kv_heads, head_dim, page = 6, 2, 32, 16
    tables = np.array([[0, 1, 2, 5], [0, 1, 3, 5], [4, 5, 5, 5], [5, 5, 5, 5], [3, 2, 1, 0]], np.int32)
    lengths = np.array([48, 37, 1, 0, 64], np.int32)
    q, keys, values = (
        normal(0, 5, heads, head_dim),
        normal(1, 6, kv_heads, head_dim, page),
        normal(2, 6, kv_heads, page, head_dim),
    )
    expected = reference(q, keys, values, tables, lengths)
    values = values.at[5].set(jnp.nan).at[4, :, 1:].set(jnp.nan)
    keys = keys.at[5].set(jnp.nan).at[4, :, :, 1:].set(jnp.nan)
    splits = kv_splits_of(tables, lengths, group=heads // kv_heads, page=page)
    exact = PAGED_ATTENTION(q, keys, values, tables, splits, lengths, scale=head_dim**-0.5)
    np.testing.assert_allclose(exact, expected, rtol=2e-5, atol=1e-5)
    q, keys, values = (array.astype(jnp.bfloat16) for array in (q, keys, values))
    rounded = PAGED_ATTENTION(q, keys, values, tables, splits, lengths, scale=head_dim**-0.5)
    np.testing.assert_allclose(np.asarray(rounded, np.float32), expected, atol=0.03)


def test_splits_may_cover_positions_that_are_not_written_yet() -> None:
    """The splits cover the positions of a whole dispatch. Sequences attend to the positions up to their
    present lengths; all later positions are NaN. The last part of sequence 1 is still empty."""
    heads, kv_heads, head_dim, page = 4, 2, 16, 16
    tables = np.arange(20, dtype=np.int32).reshape(2, 10)
    lengths = np.array([140, 127], np.int32)
    q = normal(0, 2, heads, head_dim)
    keys, values = normal(1, 20, kv_heads, head_dim, page), normal(2, 20, kv_heads, page, head_dim)
    expected = reference(q, keys, values, tables, lengths)
    for row, length in enumerate(lengths):
        first, offset = tables[row, length // page], length % page
        unwritten = tables[row, length // page + 1 :]
        keys = keys.at[first, :, :, offset:].set(jnp.nan).at[unwritten].set(jnp.nan)
        values = values.at[first, :, offset:].set(jnp.nan).at[unwritten].set(jnp.nan)
    splits = kv_splits_of(tables, lengths + 8, group=heads // kv_heads, page=page)
    assert splits.num_parts.tolist() == [2, 2]
    actual = PAGED_ATTENTION(q, keys, values, tables, splits, lengths, scale=head_dim**-0.5)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


def reference(
    q: ArrayLike, keys: ArrayLike, values: ArrayLike, tables: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the result of `paged_attention`, computed for one sequence and one head at a time in float64."""
    q, keys, values = (np.asarray(array, np.float64) for array in (q, keys, values))
    out = np.zeros(q.shape)
    for row, head in np.ndindex(*q.shape[:2]):
        kv_head, length = head // (q.shape[1] // keys.shape[1]), lengths[row]
        if length == 0:
            continue
        row_keys = np.concatenate([keys[number, kv_head] for number in tables[row]], axis=1)[:, :length]
        row_values = np.concatenate([values[number, kv_head] for number in tables[row]])[:length]
        scores = q[row, head] @ row_keys * q.shape[2] ** -0.5 * np.log2(np.e)
        weights = 2.0 ** (scores - scores.max())
        out[row, head] = weights @ row_values / weights.sum()
    return out


def test_a_result_does_not_depend_on_other_sequences_of_a_split() -> None:
    """Sequences 0 to 5 share two parts of 8 pages and half of a third. Sequence 6 shares their first part,
    sequence 7 is empty, and sequence 8 has parts of 16 pages."""
    heads, kv_heads, head_dim, page, width = 8, 2, 16, 16, 150
    tables = np.arange(9 * width, dtype=np.int32).reshape(9, width)
    tables[1:6, :20], tables[6, :8] = tables[0, :20], tables[0, :8]
    lengths = np.array([330, 380, 321, 400, 322, 385, 200, 0, 2400], np.int32)
    q = normal(0, 9, heads, head_dim)
    keys, values = (
        normal(1, tables.size, kv_heads, head_dim, page),
        normal(2, tables.size, kv_heads, page, head_dim),
    )
    splits = kv_splits_of(tables, lengths, group=heads // kv_heads, page=page)
    assert splits.num_parts.tolist() == [3, 3, 3, 4, 3, 4, 2, 0, 10]
    assert splits.rows[: splits.counts[0]].tolist()[:2] == [[0, 1, 2, 3], [4, 5, 6, -1]]
    actual = PAGED_ATTENTION(q, keys, values, tables, splits, lengths, scale=head_dim**-0.5)
    np.testing.assert_allclose(actual, reference(q, keys, values, tables, lengths), rtol=2e-5, atol=1e-5)
    for row in range(9):
        only_row = np.where(np.arange(9) == row, lengths, 0)
        alone = PAGED_ATTENTION(
            q,
            keys,
            values,
            tables,
            kv_splits_of(tables, only_row, group=heads // kv_heads, page=page),
            only_row,
            scale=head_dim**-0.5,
        )
        np.testing.assert_array_equal(actual[row], alone[row])


# In the first case, each program of the kernel processes two heads. In the second case it processes one head,
# because there are fewer than `many_tiles` pairs of a tile and a head, and in the third case because an odd
# number of heads (three) shares a key-value head.
@pytest.mark.parametrize(("heads", "many_tiles"), [(4, 1), (4, 1000), (6, 1)])
def test_prefill_attention_by_kernel_and_by_loop_is_equal(
    heads: int, many_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles belong to a prompt with a cached prefix, a prompt of two tiles with NaN after its end, and a
    short prompt. The last tile is padding."""
    monkeypatch.setattr(paged_kernel, "MANY_TILES", many_tiles)
    cache = KVCache(keys=normal(0, 2, 12, 2, 32, PAGE_SIZE), values=normal(1, 2, 12, 2, PAGE_SIZE, 32))
    q = normal(2, 5, PREFILL_TILE, heads, 32)
    tables = np.array([[1, 2, 3], [4, 5, 6], [4, 5, 6], [7, 0, 0], [8, 0, 0]], np.int32)
    tiles = PrefillTiles(
        starts=np.array([70, 0, 64, 0, 0], np.int32),
        lengths=np.array([64, 64, 40, 9, 0], np.int32),
        tables=tables,
    )
    expected = jax.jit(partial(prefill_attention.attend_by_loop, attention_spec(32)))(
        cache, jnp.int32(1), tiles, q
    )
    cache = KVCache(
        keys=cache.keys.at[:, 5, :, :, 40:].set(jnp.nan), values=cache.values.at[:, 5, :, 40:].set(jnp.nan)
    )
    attend = jax.jit(partial(prefill_attention.attend_by_kernel, attention_spec(32)))
    actual = np.asarray(attend(cache, jnp.int32(1), tiles, q))
    for tile, length in enumerate(tiles.lengths):
        np.testing.assert_allclose(actual[tile, :length], expected[tile, :length], atol=1e-5)
    other_queries = normal(3, 5, PREFILL_TILE, heads, 32).at[0].set(q[0])
    starts = np.array([70, 3, 0, 0, 0], np.int32)
    with_other_tiles = np.asarray(attend(cache, jnp.int32(1), replace(tiles, starts=starts), other_queries))
    np.testing.assert_array_equal(with_other_tiles[0], actual[0])


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "transposed"), [(1, 32, 48, False), (8, 48, 32, True), (20, 160, 96, False)]
)
def test_grouped_products_equal_each_tile_times_its_expert(
    rows: int, inputs: int, outputs: int, transposed: bool
) -> None:
    tiles, experts = normal(0, 6, rows, inputs), np.array([0, 0, 3, 4, 4, 1], np.int32)
    weight = normal(1, 5, inputs, outputs) if transposed else normal(1, 5, outputs, inputs)
    multiply = partial(grouped_kernel.grouped_products, transposed=transposed)
    actual = jax.jit(multiply)(tiles, weight, experts, jnp.int32(4))
    assert grouped_kernel.fits(tiles, weight)
    expected = jnp.einsum("nbi,nio->nbo" if transposed else "nbi,noi->nbo", tiles, weight[experts])
    np.testing.assert_allclose(actual[:4], expected[:4], rtol=1e-5, atol=1e-4)
    assert not np.any(actual[4:])


def test_experts_by_kernel_and_by_loop_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare values and gradients with one adapter, and values with one adapter per row."""
    hidden, width, count, rank, choice = 32, 16, 5, 2, Experts(count=5, per_token=2, normalized=True)
    x = normal(0, 3, 7, hidden)
    routed = experts.route(choice, normal(1, count, hidden), x)
    gate_up, down = normal(2, 2, count, 2 * width, hidden) / 4, normal(3, 2, count, hidden, width) / 4

    def module(inputs: int, parts: tuple[int, ...], *lead: int) -> LoraWeights:
        b = tuple(normal(5, *lead, count, rank, part) for part in parts)
        return LoraWeights(
            a=normal(4, *lead, count, inputs, len(parts) * rank) / 4,
            b=b,
            scale=np.full(lead, 0.5, np.float32),
        )

    adapter = module(hidden, (width, width)), module(width, (hidden,))
    indices, layer = lora_indices(np.array([2, 0, 2], np.int32)), np.int32(1)
    bank = tuple(
        replace(lora, indices=indices, layer=layer)
        for lora in (module(hidden, (width, width), 3, 2), module(width, (hidden,), 3, 2))
    )

    def results() -> list[np.ndarray]:
        mix = partial(experts.mix_experts, choice, layer=jnp.int32(1))
        loss = jax.jit(
            jax.value_and_grad(
                lambda x, adapter: jnp.sin(mix(x, routed, gate_up, down, adapter)).sum(),
                argnums=(0, 1),
                allow_int=True,
            )
        )
        return jax.tree.leaves((loss(x, adapter), jax.jit(mix)(x, routed, gate_up, down, bank)))

    expected = results()
    monkeypatch.setattr(experts, "_products", grouped_kernel.grouped_products)
    monkeypatch.setattr(experts, "on_gpu", lambda: True)
    for actual, desired in zip(results(), expected, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-5)


def test_decode_attention_over_pages_and_segments_is_equal() -> None:
    """The third row is that of a free slot, whose keys and values are not written."""
    config = replace(tiny_qwen3.CONFIG, num_layers=2, num_kv_heads=2, head_dim=16)
    cache = KVCache(keys=normal(0, 2, 7, 2, 16, PAGE_SIZE), values=normal(1, 2, 7, 2, PAGE_SIZE, 16))
    q, k, v = normal(2, 3, 1, 4, 16), normal(3, 3, 1, 2, 16), normal(4, 3, 1, 2, 16)
    tables, positions = np.array([[1, 2], [3, 4], [5, 0]]), np.array([100, 64, 0])
    past = read_positions(config, cache, 1, tables, ends=(2 * PAGE_SIZE,))
    masks = [(jnp.arange(2 * PAGE_SIZE) < positions[:, None])[:, None, None], jnp.ones((1, 1, 1, 1), bool)]
    expected = attend_over_segments(attention_spec(16), q, [*past, segment_of(k, v)], masks)
    actual, written = attend_over_pages(
        config,
        cache,
        (q, k, v),
        TokenRows(
            positions=jnp.asarray(positions),
            is_written=jnp.array([True, True, False]),
            tables=jnp.asarray(tables),
        ),
        kv_splits_of(tables, np.array([108, 72, 0]), group=2),
        spec=attention_spec(16),
        layer=1,
    )
    np.testing.assert_allclose(actual[:2], expected[:2], atol=1e-5)
    assert not actual[2].any()
    keys = cache.keys.at[1, 2, :, :, 100 - PAGE_SIZE].set(k[0, 0]).at[1, 4, :, :, 0].set(k[1, 0])
    values = cache.values.at[1, 2, :, 100 - PAGE_SIZE].set(v[0, 0]).at[1, 4, :, 0].set(v[1, 0])
    np.testing.assert_array_equal(written.keys, keys)
    np.testing.assert_array_equal(written.values, values)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.0)])
@pytest.mark.parametrize("normalizes", [True, False])
def test_heads_normalized_and_rotated_by_kernel_are_equal(
    normalizes: bool, dtype: str, tolerance: float
) -> None:
    fused = normal(0, 3, 8, 16, dtype=dtype)
    norms = (normal(1, 16, dtype=dtype), normal(2, 16, dtype=dtype)) if normalizes else None
    rope = rope_tables(RopeSpec(dim=16, theta=100.0), np.array([[0], [3], [70]]), jnp.dtype(dtype))
    actual = normalize_and_rotate(fused, (4, 2), norms, rope.cos[:, 0], rope.sin[:, 0], eps=1e-6)
    np.testing.assert_array_equal(actual[2], fused[:, 6:])
    for index, (heads, kernel_heads) in enumerate(
        zip((fused[:, :4], fused[:, 4:6]), actual[:2], strict=True)
    ):
        with jax.disable_jit():  # XLA may omit rounding within a program
            normed = heads if norms is None else rms_norm(heads, norms[index], 1e-6)
            expected = rotate(normed[:, None], rope)[:, 0]
        assert kernel_heads.dtype == expected.dtype
        np.testing.assert_allclose(
            np.asarray(kernel_heads, np.float32),
            np.asarray(expected, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("max_loras", [1, 5])
@pytest.mark.parametrize("has_layers", [True, False])
def test_decode_steps_on_a_gpu_read_factors_in_place(
    has_layers: bool, max_loras: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `has_layers`, the factors have no axis of layers, as those of the output head."""
    config, widths, rank, leading = tiny_qwen3.CONFIG, (24, 8, 8), 3, (5, 2) if has_layers else (5,)
    x, weight = normal(0, 6, 1, 16), normal(1, sum(widths), 16)
    slots = np.array([2] * 6 if max_loras == 1 else [2, 0, 2, 4, 0, 0])
    indices = lora_indices(slots, counts=(1, 5))
    assert indices.max_loras == max_loras
    module = LoraWeights(
        a=normal(2, *leading, 16, len(widths) * rank),
        b=tuple(normal(3 + part, *leading, rank, width) for part, width in enumerate(widths)),
        scale=np.linspace(0.5, 2, prod(leading), dtype=np.float32).reshape(leading),
        indices=indices,
        layer=np.array(1, np.int32) if has_layers else None,
    )
    expected = project(config, x, weight, widths, module)
    delta = mock.Mock(side_effect=lora_delta)
    monkeypatch.setattr(lora_math, "on_gpu", lambda: True)
    monkeypatch.setattr(lora_math, "lora_delta", delta)
    for actual, desired in zip(project(config, x, weight, widths, module), expected, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=2e-5 * float(jnp.abs(desired).max()))
    delta.assert_called_once()


def test_a_gpu_has_a_decode_program_for_one_slot_and_one_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = replace(tiny_qwen3.CONFIG, latent=mock.sentinel.latent)
    assert adapter_counts(tiny_qwen3.CONFIG, 9, decodes=True) is None, "this test runs on a CPU"
    monkeypatch.setattr(lora_math, "on_gpu", lambda: True)
    assert adapter_counts(tiny_qwen3.CONFIG, 9, decodes=True) == (1, 9)
    assert adapter_counts(tiny_qwen3.CONFIG, 9, decodes=False) == (1, 4, 9)
    assert adapter_counts(tiny_qwen3.CONFIG, 3, decodes=False) == (1, 3)
    assert adapter_counts(latent, 9, decodes=True) == (1, 4, 9)


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize(
    ("batch", "inputs", "rank", "widths", "num_slots"),
    [
        (4, 128, 32, (64,), 1),
        (16, 1408, 64, (128, 64, 192), 1),
        (40, 2560, 16, (512, 128), 2),
        (19, 100, 48, (4160, 40), 8),
    ],
)
def test_deltas_by_kernel_and_by_products_are_equal(
    batch: int, inputs: int, rank: int, widths: tuple[int, ...], num_slots: int, is_ordered: bool
) -> None:
    x, a = normal(0, batch, inputs), normal(1, num_slots, 2, inputs, len(widths) * rank)
    b = [normal(2 + part, num_slots, 2, rank, width) for part, width in enumerate(widths)]
    scale = np.linspace(0.5, 2, num_slots * 2, dtype=np.float32).reshape(num_slots, 2)
    slots = np.arange(batch, dtype=np.int32) * 3 % num_slots
    actual = lora_delta(
        x,
        a,
        b,
        jnp.asarray(scale),
        slots=jnp.asarray(slots),
        layer=jnp.int32(1),
        order=jnp.argsort(slots) if is_ordered else None,
        one_slot=num_slots == 1,
    )
    inner = jnp.split(jnp.einsum("bi,bir->br", x, a[slots, 1]), len(widths), axis=-1)
    parts = [jnp.einsum("br,bro->bo", part, matrix[slots, 1]) for part, matrix in zip(inner, b, strict=True)]
    expected = jnp.concatenate(parts, axis=-1) * scale[slots, 1][:, None]
    np.testing.assert_allclose(actual, expected, atol=2e-5 * float(jnp.abs(expected).max()))


def test_the_delta_of_a_sequence_does_not_depend_on_the_batch() -> None:
    x, slots = normal(0, 33, 1280, dtype="bfloat16"), jnp.arange(33, dtype=jnp.int32) % 3
    a, b = normal(1, 3, 1, 1280, 32, dtype="bfloat16"), normal(2, 3, 1, 32, 64, dtype="bfloat16")

    def delta(rows: slice, *, one_slot: bool = False) -> np.ndarray:
        options = {"layer": jnp.int32(0), "one_slot": one_slot}
        order = jnp.argsort(slots[rows])
        return np.asarray(
            lora_delta(x[rows], a, [b], jnp.ones((3, 1)), slots=slots[rows], order=order, **options)
        )

    whole = delta(slice(0, 33))
    for rows in (slice(5, 21), slice(17, 33)):
        np.testing.assert_array_equal(delta(rows), whole[rows])
    np.testing.assert_array_equal(delta(slice(4, 5), one_slot=True), whole[4:5])


def test_one_delta_per_projection_has_equal_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config, widths = tiny_qwen3.CONFIG, (24, 8, 8)
    x, weight = normal(0, 2, 5, 16), normal(1, sum(widths), 16)
    a, b = normal(2, 16, 9), tuple(normal(3 + part, 3, width) for part, width in enumerate(widths))
    loss_weights = normal(9, 2, 5, sum(widths))

    def loss(x: jax.Array, a: ArrayLike, b: tuple[ArrayLike, ...]) -> jax.Array:
        module = LoraWeights(a=a, b=b, scale=np.array(0.5, np.float32))
        return (loss_weights * jnp.concatenate(project(config, x, weight, widths, module), axis=-1)).sum()

    results = []
    for is_gpu in (False, True):
        monkeypatch.setattr(lora_math, "on_gpu", lambda is_gpu=is_gpu: is_gpu)
        results.append(jax.value_and_grad(loss, argnums=(0, 1, 2))(x, a, b))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *results)


def test_a_gpu_accumulates_one_delta_per_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One delta for each part would make XLA copy each part of the output."""
    monkeypatch.setattr(lora_math, "on_gpu", lambda: True)
    config, widths = tiny_qwen3.CONFIG, (24, 8, 8)
    module = LoraWeights(
        a=normal(2, 16, 9), b=tuple(normal(3, 3, width) for width in widths), scale=np.array(1, np.float32)
    )
    x, weight = normal(0, 1, 6, 16), normal(1, sum(widths), 16)
    jaxpr = jax.make_jaxpr(lambda x: project(config, x, weight, widths, module))(x)
    assert str(jaxpr).count("dot_general") == 3  # with the weight, A and B


def test_a_server_with_the_kernel_samples_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five samples of one prompt run together with a sample of another prompt, and share KV splits."""
    # a head width that the kernels support
    model_dir = make_model(tmp_path / "model", replace(TINY, max_position_embeddings=1200, head_dim=16))
    random = np.random.default_rng(0)
    prompt, other_prompt = (random.integers(0, 256, length).astype(np.int32) for length in (1000, 600))

    def sample_all(directory: str) -> list[SampledSequence]:
        engine = Engine(DeviceExecutor(make_settings(model_dir, tmp_path / directory)))
        engine.start()
        try:
            settings = SamplingSettings(max_tokens=20, seed=0, stop_at_eos=False)
            ops = [
                Sample(weights=None, prompt=prompt, settings=settings, num_samples=5),
                Sample(weights=None, prompt=other_prompt, settings=settings),
            ]
            results = [future.result(120) for future in [engine.submit(op) for op in ops]]
            alone = engine.submit(Sample(weights=None, prompt=prompt, settings=settings)).result(120)
            filtered = engine.submit(
                Sample(weights=None, prompt=prompt, settings=replace(settings, top_p=0.5))
            ).result(120)
            assert isinstance(alone, SampleResult) and isinstance(filtered, SampleResult)
            results.append(filtered)
            return [*alone.sequences, *(sequence for result in results for sequence in result.sequences)]
        finally:
            engine.stop()

    expected = sample_all("loop")
    split_sizes: set[int] = set()

    def record_split_sizes(*args: Any, **options: Any) -> KVSplits:
        splits = kv_splits_of(*args, **options)
        split_sizes.update((splits.rows[: splits.counts[0]] >= 0).sum(axis=1).tolist())
        return splits

    monkeypatch.setattr(model_runner, "on_gpu", lambda: True)
    monkeypatch.setattr(decode_batch, "kv_splits_of", record_split_sizes)
    monkeypatch.setattr(decode_attention, "paged_attention", PAGED_ATTENTION)  # compiled once for all layers
    monkeypatch.setattr(prefill_attention, "attend_by_loop", prefill_attention.attend_by_kernel)
    jax.clear_caches()  # otherwise a program without the kernel would be reused
    actual = sample_all("kernel")
    jax.clear_caches()
    assert split_sizes == {1, 5}
    for sequence, desired in zip(actual, expected, strict=True):
        assert sequence.tokens.tolist() == desired.tokens.tolist()
        np.testing.assert_allclose(sequence.logprobs, desired.logprobs, atol=1e-4)
    assert actual[0].tokens.tolist() == actual[1].tokens.tolist(), (
        "a sample in a group equals a sample alone with the same seed"
    )
    assert actual[-1].tokens.tolist() != actual[0].tokens.tolist(), "top_p has no effect"


@pytest.mark.filterwarnings(TRITON_DEPRECATION)
def test_decode_steps_lower_for_a_gpu_with_a_kernel_per_layer() -> None:
    config = replace(tiny_qwen3.CONFIG, head_dim=64)
    params = jax.eval_shape(partial(init_params, config, dtype=jnp.bfloat16), jax.random.key(0))
    bank = jax.tree.map(lambda leaf: np.stack([leaf] * 2), zero_adapter(config, tiny_qwen3.MAX_RANK))
    cache = jax.eval_shape(partial(empty_cache, config=config, pages=40, dtype=np.dtype(jnp.bfloat16)))
    rows = DecodeBatch(
        tokens=np.zeros(4, np.int32),
        before=Carry.empty(4),
        positions=np.zeros(4, np.int32),
        remaining=np.ones(4, np.int32),
        tables=np.zeros((4, 9), np.int32),
        splits=kv_splits_of(np.zeros((4, 9), np.int32), np.zeros(4, np.int32), group=2),
        adapters=lora_indices(np.zeros(4, np.int32)),
        stop_tokens=np.zeros((4, MAX_STOP_TOKENS), np.int32),
    )
    arguments = (cache, params, bank, rows, batch_settings([None] * 4, config.vocab_size))
    text = lowered(decode_steps, *arguments, config=config, steps=8, ends=None, tempered=False)
    assert text.count('name = "paged_attention"') == config.num_layers


@pytest.mark.filterwarnings(TRITON_DEPRECATION)
def test_the_training_step_and_the_paged_kernel_lower_for_a_gpu() -> None:
    batch = packed_batch(seed=0, rows=1)
    config = replace(tiny_qwen3.CONFIG, head_dim=64)
    params = jax.eval_shape(partial(init_params, config, dtype=jnp.bfloat16), jax.random.key(0))
    adapter = zero_adapter(config, tiny_qwen3.MAX_RANK)
    arguments = (adapter, adapter, params, batch, select_loss(LossFn.CROSS_ENTROPY))
    step = lowered(forward_backward, *arguments, config=config, remat=Remat.ACTIVATIONS)
    names = ("tree_attention_forward", "tree_attention_query_gradient", "tree_attention_key_gradient")
    # The backward pass uses the stored results of the forward kernel.
    assert [step.count(f'name = "{name}"') for name in names] == [1, 1, 1]
    head = f"tensor<{config.vocab_size}x{config.hidden_size}x"
    assert head + "bf16>" in step and head + "f32>" not in step, "the head is not converted to float32"
    pages = (
        jax.ShapeDtypeStruct((9, 2, 128, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((9, 2, 64, 128), jnp.bfloat16),
    )
    tables = np.zeros((4, 8), np.int32)
    rows = (
        jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16),
        tables,
        kv_splits_of(tables, np.zeros(4, np.int32), group=4),
        np.zeros(4, np.int32),
    )
    assert 'name = "paged_attention"' in lowered(
        jax.jit(partial(paged_attention, scale=128**-0.5)), rows[0], *pages, *rows[1:]
    )


def lowered(program: Wrapped, *arguments: object, **options: object) -> str:
    with (
        mock.patch.object(pl, "pallas_call", COMPILED),
        use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)),
    ):
        return program.trace(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()
