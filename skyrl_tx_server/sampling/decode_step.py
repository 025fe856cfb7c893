"""The decode program. It computes one dispatch: several decode steps for all sequences in decode slots.

In the shapes of arrays, B is the number of slots of the decode batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.decode_attention import (
    HEADS,
    TokenRows,
    attend_over_pages,
    attend_over_segments,
)
from skyrl_tx_server.model.attention.kv_splits import KVSplits
from skyrl_tx_server.model.kv_cache import (
    KVCache,
    Segment,
    keep_cache,
    read_positions,
    segment_of,
    stacked,
    write_positions,
)
from skyrl_tx_server.model.layers import rms_norm
from skyrl_tx_server.model.lora.adapter import Adapter
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices
from skyrl_tx_server.model.mesh import BATCH, constrain, keep_replicated, weight_stationary
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig
from skyrl_tx_server.model.transformer import (
    SAMPLING_OPTIONS,
    Params,
    head_logits,
    ropes_of,
)
from skyrl_tx_server.sampling.decode_layers import DecodeModel, Recent, rolled_layers, unrolled_layers
from skyrl_tx_server.sampling.token_sampling import BatchSettings, sample_tokens


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class Carry:
    """The state that a dispatch leaves on the device for the next dispatch. The next dispatch can therefore
    begin before the host has processed the outputs of this dispatch."""

    tokens: ArrayLike  # [B] int32, the last token of each sequence
    active: ArrayLike  # [B] bool, whether the sequence has tokens to sample after this dispatch

    @classmethod
    def empty(cls, slots: int) -> Carry:
        return cls(tokens=np.zeros(slots, np.int32), active=np.zeros(slots, np.bool_))


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """The sequences in the B decode slots at the start of a dispatch. A block table has W entries."""

    tokens: ArrayLike  # [B] int32, the last token, not in the KV cache yet; -1: the token is in `before`
    before: Carry  # the carry of the previous dispatch
    positions: ArrayLike  # [B] int32, position of the last token = number of cached tokens; 0 for a free slot
    remaining: ArrayLike  # [B] int32, maximum number of tokens to sample; 0 for a free slot
    tables: ArrayLike  # [B, W] int32, block tables with the pages for this dispatch, padded with null pages
    splits: KVSplits | None  # KV splits for the GPU kernel; None: pages are copied into segments
    adapters: LoraIndices  # one LoRA slot per sequence
    stop_tokens: ArrayLike  # [B, MAX_STOP_TOKENS] int32, padded with -1


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutputs:
    """The outputs of a dispatch. Tokens after the end of a sequence are -1."""

    tokens: jax.Array  # [B, steps] int32
    logprobs: jax.Array  # [B, steps] float32
    carry: Carry


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class _LoopState:
    """The state between two decode steps of a dispatch."""

    last: jax.Array  # [B] int32, the last token of each sequence
    remaining: jax.Array  # [B] int32, maximum number of tokens to sample
    recent: Recent
    tokens: jax.Array  # [B, steps] int32, `DecodeOutputs.tokens`
    logprobs: jax.Array  # [B, steps] float32, `DecodeOutputs.logprobs`


@partial(
    jax.jit,
    static_argnames=("config", "steps", "ends", "tempered", "filters", "rolled"),
    donate_argnames=("cache",),
    compiler_options=SAMPLING_OPTIONS,
)
def decode_steps(
    cache: KVCache,
    params: Params,
    lora_slots: Adapter,
    batch: DecodeBatch,
    settings: BatchSettings,
    *,
    config: ModelConfig,
    steps: int,
    ends: tuple[int, ...] | None,
    tempered: bool,
    filters: bool | None = None,
    rolled: bool = False,
) -> tuple[KVCache, DecodeOutputs]:
    """Sample up to `steps` tokens for every sequence. A sequence that ends early is idle until the end of
    the dispatch. `tempered` and `filters` are arguments of `sample_tokens`.

    With `ends=None`, each step writes its keys and values to the KV pages. A GPU kernel reads the pages in
    place, in the KV splits of `batch.splits`.

    With other `ends`, the dispatch first copies the pages into segments that end at the positions `ends`. The
    position of every sequence must not exceed the last end. On a CPU, results are bit-identical for every
    number of segments. Each step writes the new keys and values of all sequences at the same index of a small
    array, and attention reads the segments and this array. At the end, the dispatch writes the new keys and
    values to the pages. The pages are therefore read and written once per dispatch and not in every step.

    With `rolled`, a loop runs the layers. The loop copies the weights of each layer out of `params`, so
    decoding is slower, but the compilation time does not grow with the number of layers. On a CPU, the
    results are the same as without `rolled`.
    """
    config, slots = weight_stationary(config), batch.tokens.shape[0]
    adapter = replace(lora_slots, head=replace(lora_slots.head, indices=batch.adapters))
    tables = jnp.asarray(batch.tables)
    past_positions = [jnp.arange(first, end)[None] for first, end in pairwise((0, *(ends or ())))]
    past_masks = [(keys < batch.positions[:, None])[:, None, None] for keys in past_positions]
    empty = jnp.zeros((slots, steps, config.num_kv_heads, config.head_dim), cache.keys.dtype)

    def read_past(number: ArrayLike | int) -> list[Segment] | None:
        return None if ends is None else read_positions(config, cache, number, tables, ends=ends)

    def attend(
        number: ArrayLike | int,
        past: list[Segment] | None,
        recent: Recent,
        index: jax.Array,
        spec: AttentionSpec,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[jax.Array, Recent]:
        """Compute attention in layer `number` in step `index`. `past` has the cached segments of the
        layer."""
        if isinstance(recent, KVCache):
            assert batch.splits is not None
            row = TokenRows(
                positions=jnp.asarray(batch.positions) + index, is_written=start.remaining > 0, tables=tables
            )
            return attend_over_pages(config, recent, (q, k, v), row, batch.splits, spec=spec, layer=number)
        if isinstance(recent, list):
            assert isinstance(number, int)
            attended, segment = attend(number, past, recent[number], index, spec, q, k, v)
            assert isinstance(segment, Segment)
            return attended, [*recent[:number], segment, *recent[number + 1 :]]
        recent, visible = _append(recent, index, k, v), (jnp.arange(steps) <= index)[None, None, None]
        assert past is not None
        q, masks = constrain(config.mesh, q, HEADS), [*past_masks, visible]
        if spec.sliding_window is not None:
            recent_positions = batch.positions[:, None] + jnp.arange(steps)
            first = (batch.positions + index - spec.sliding_window + 1)[:, None]
            masks = [
                mask & (keys >= first)[:, None, None]
                for mask, keys in zip(masks, [*past_positions, recent_positions], strict=True)
            ]
        return attend_over_segments(spec, q, [*past, recent], masks), recent

    model = DecodeModel(
        config=config,
        params=params,
        lora_slots=lora_slots,
        indices=batch.adapters,
        read_past=read_past,
        attend=attend,
    )
    recent: Recent = cache
    if ends is not None:
        segment = segment_of(empty, empty)
        recent = _repeated(segment, config.num_layers) if rolled else [segment] * config.num_layers
    run_layers = rolled_layers(model) if rolled else unrolled_layers(model)

    def step(index: jax.Array, state: _LoopState) -> _LoopState:
        positions = batch.positions + index
        x = params.embed[state.last][:, None]
        ropes = ropes_of(config, positions[:, None], x.dtype)
        x, written = run_layers(x, ropes, state.recent, index)
        hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
        logits = constrain(
            config.mesh, head_logits(config, params, adapter, hidden)[:, 0], PartitionSpec(BATCH)
        )
        sampled, logprobs = sample_tokens(logits, settings, positions + 1, tempered=tempered, filters=filters)
        active = state.remaining > 0
        stopped = (sampled[:, None] == batch.stop_tokens).any(axis=1)
        return _LoopState(
            last=jnp.where(active, sampled, state.last),
            remaining=jnp.where(stopped, 0, jnp.maximum(state.remaining - 1, 0)),
            recent=written,
            tokens=state.tokens.at[:, index].set(jnp.where(active, sampled, -1)),
            logprobs=state.logprobs.at[:, index].set(jnp.where(active, logprobs, 0.0)),
        )

    carried = batch.tokens < 0
    start = _LoopState(
        last=jnp.where(carried, batch.before.tokens, batch.tokens),
        remaining=jnp.where(carried & ~batch.before.active, 0, batch.remaining),
        recent=recent,
        tokens=jnp.full((slots, steps), -1, jnp.int32),
        logprobs=jnp.zeros((slots, steps), jnp.float32),
    )
    end = _run_steps(step, steps, start, until_all_end=ends is not None)
    if isinstance(end.recent, KVCache):
        cache = end.recent
    else:
        counts = jnp.where(start.remaining > 0, steps, 0)
        cache = write_positions(
            config,
            cache,
            end.recent if isinstance(end.recent, Segment) else stacked(end.recent),
            batch.tables,
            batch.positions,
            counts,
        )
    carry = keep_replicated(config, Carry(tokens=end.last, active=end.remaining > 0))
    return keep_cache(config, cache), DecodeOutputs(tokens=end.tokens, logprobs=end.logprobs, carry=carry)


def _run_steps(
    step: Callable[[jax.Array, _LoopState], _LoopState], steps: int, start: _LoopState, *, until_all_end: bool
) -> _LoopState:
    """Run `steps` steps and return the last state. With `until_all_end`, stop when all sequences have ended;
    the outputs are the same. With the GPU kernel, `until_all_end` is False, because a GPU would wait for the
    host at the test after each step."""
    if not until_all_end:
        return jax.lax.fori_loop(0, steps, step, start)

    def is_unfinished(state: tuple[jax.Array, _LoopState]) -> jax.Array:
        return (state[0] < steps) & (state[1].remaining > 0).any()

    def advance(state: tuple[jax.Array, _LoopState]) -> tuple[jax.Array, _LoopState]:
        return state[0] + 1, step(*state)

    return jax.lax.while_loop(is_unfinished, advance, (jnp.zeros((), jnp.int32), start))[1]


def _repeated(segment: Segment, layers: int) -> Segment:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (layers, *leaf.shape)), segment)


def _append(recent: Segment, index: jax.Array, k: jax.Array, v: jax.Array) -> Segment:
    """Return `recent` with the keys and values [B, 1, KV heads, head dimension] of step `index`."""
    new = segment_of(k, v)
    return Segment(
        keys=jax.lax.dynamic_update_slice_in_dim(recent.keys, new.keys, index, axis=3),
        values=jax.lax.dynamic_update_slice_in_dim(recent.values, new.values, index, axis=2),
    )
