"""The sampling programs: prefill blocks of prompts into their pages, decode a block of steps over all rows.

Every setting of a row is an array, so requests with different settings share a batch and compile nothing. A sampled token's logprob is of
the model's own distribution (temperature 1), or of the `tempered` one it was drawn from where the server is set to that; filters (top-k,
top-p) never count, greedy rows and prompts are always at temperature 1. All in float32.

The randomness of a token depends on its request's seed, the sample's index and the token's position, never on the batch:
key = fold_in(fold_in(seed, index), position).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.attention.decode_attention import HEADS, attend_over_pages, attend_over_segments
from skyrl_tx_server.model.attention.kv_splits import KVSplits
from skyrl_tx_server.model.attention.prefill_attention import Blocks, attend_to_pages
from skyrl_tx_server.model.attention.softmax import MASKED
from skyrl_tx_server.model.families.layer_spec import LayerParams, Stack
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.kv_cache import (
    KVCache,
    Segment,
    copy_pages,
    keep_cache,
    read_rows,
    segment_of,
    stacked,
    write_layer,
    write_rows,
)
from skyrl_tx_server.model.layers import rms_norm
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter, bank_layers
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices
from skyrl_tx_server.model.mesh import BATCH, constrain, keep_replicated, weight_stationary
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import (
    COMPILER_OPTIONS,
    Params,
    by_layer,
    cut_stack,
    head_logits,
    layer,
    reads_in_place,
    ropes_of,
)

MAX_STOP_TOKENS = 16
MAX_PROMPT_LOGITS = 1 << 24
"""Prompt logits held at once, 64 MiB in float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How each row is sampled; every array has a leading row axis B."""

    seeds: ArrayLike  # [B, 2] uint32, high and low half of the request's 64-bit seed
    sample_indices: ArrayLike  # [B] int32, which sample of its request
    temperatures: ArrayLike  # [B] float32, 0 is greedy
    top_k: ArrayLike  # [B] int32, the vocabulary size is off
    top_p: ArrayLike  # [B] float32, 1 is off


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    """N blocks of T tokens of prompts, which are computed together. What comes before them lies in their pages already."""

    tokens: ArrayLike  # [N, T] int32, right-padded
    targets: ArrayLike  # [N, T] int32, the token after each; 0 after a prompt's last
    blocks: Blocks
    adapters: LoraIndices  # of the bank, by block
    before: ArrayLike  # [C, 2] int32, pages to copy into others before it is run, as `copy_pages` has them
    after: ArrayLike  # [C, 2] int32, and after it
    want_logprobs: ArrayLike  # [] bool
    lasts: ArrayLike  # [B] int32, where in [N * T] lies the token before the first of each row that begins
    begins: ArrayLike  # [B] bool
    row_adapters: LoraIndices  # of the bank, by row


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutputs:
    """What a pass returns to the host."""

    logprobs: ArrayLike  # [N, T] float32 of `targets`; zeros when not wanted
    first_tokens: jax.Array  # [B] int32, what each row that begins samples first
    first_logprobs: jax.Array  # [B] float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Carry:
    """What a block leaves on the device for the one after it, which can so begin before the host has looked at anything."""

    tokens: ArrayLike  # [B] int32, each row's last
    going: ArrayLike  # [B] bool, whether it has not ended

    @classmethod
    def of_none(cls, rows: int) -> Carry:
        return cls(tokens=np.zeros(rows, np.int32), going=np.zeros(rows, np.bool_))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBatch:
    """The decode slots at the start of a block."""

    tokens: ArrayLike  # [B] int32, the last token of each row, not in the cache yet; -1 of a row that goes on as `before` has it
    before: Carry
    positions: ArrayLike  # [B] int32, that token's position = tokens in the cache; 0 for a free slot
    remaining: ArrayLike  # [B] int32, tokens still to sample; 0 for a free slot
    tables: ArrayLike  # [B, W] int32, the pages of each row, with room for a block; nobody's page where there are no more
    stretches: KVSplits | None  # of those pages, as a GPU's kernel reads them; None for other decoding
    adapters: LoraIndices  # of the bank
    stop_tokens: ArrayLike  # [B, MAX_STOP_TOKENS] int32, padded with -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOutputs:
    """What a decode block returns to the host; a row's tokens beyond its end are -1."""

    tokens: jax.Array  # [B, steps] int32
    logprobs: jax.Array  # [B, steps] float32
    carry: Carry


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockState:
    """A decode block on its way."""

    last: jax.Array  # [B] int32, each row's
    remaining: jax.Array  # [B] int32
    recent: list[Segment]  # by layer, the block's own positions
    tokens: jax.Array  # [B, steps] int32, as they leave the block
    logprobs: jax.Array  # [B, steps] float32


@partial(
    jax.jit,
    static_argnames=("config", "tempered"),
    donate_argnames=("cache",),
    compiler_options=COMPILER_OPTIONS,
)
def prefill(
    cache: KVCache,
    params: Params,
    bank: Adapter,
    run: PrefillBatch,
    settings: RowSettings,
    *,
    config: ModelConfig,
    tempered: bool,
) -> tuple[KVCache, PassOutputs]:
    """Compute blocks of prompts, put their keys and values into their pages, and sample the first token of the B rows that begin."""
    config, cache = weight_stationary(config), keep_cache(config, copy_pages(config, cache, run.before))
    tokens, blocks = jnp.asarray(run.tokens), run.blocks
    x = params.embed[tokens]
    positions = blocks.starts[:, None] + jnp.arange(tokens.shape[1])
    ropes = ropes_of(config, positions, x.dtype)

    def body(
        stack: Stack,
        modules: LayerAdapter,
        whole: LayerParams,
        state: tuple[jax.Array, KVCache],
        weights: tuple[jax.Array, LayerParams],
    ) -> tuple[tuple[jax.Array, KVCache], None]:
        x, cache = state
        index, own = weights
        adapter = {
            field: replace(module, users=run.adapters, layer=index - stack.layers.start)
            for field, module in modules.items()
        }

        def attend(
            spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, KVCache]:
            written = write_layer(
                config, cache, index, segment_of(k, v), blocks.tables, blocks.starts, blocks.lengths
            )
            return attend_to_pages(config, spec, written, index, blocks, q), written

        return layer(config, stack, x, own | whole, adapter, ropes, attend), None

    for stack, weights, modules in zip(stacks_of(config), params.layers, bank.layers, strict=True):
        layers = jnp.arange(stack.layers.start, stack.layers.stop)
        own, whole = cut_stack(config, weights)
        (x, cache), _ = jax.lax.scan(partial(body, stack, modules, whole), (x, cache), (layers, own))
    cache = keep_cache(config, copy_pages(config, cache, run.after))

    hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
    logprobs = jax.lax.cond(
        run.want_logprobs,
        lambda: _prompt_logprobs(
            config, params, replace(bank, head=replace(bank.head, users=run.adapters)), hidden, run.targets
        ),
        lambda: jnp.zeros(tokens.shape, jnp.float32),
    )

    def first() -> tuple[jax.Array, jax.Array]:
        adapter = replace(bank, head=replace(bank.head, users=run.row_adapters))
        logits = head_logits(config, params, adapter, hidden.reshape(-1, 1, hidden.shape[-1])[run.lasts])[
            :, 0
        ]
        return choose(logits, settings, positions.reshape(-1)[run.lasts] + 1, tempered=tempered)

    rows = jnp.asarray(run.begins)
    first_tokens, first_logprobs = jax.lax.cond(
        rows.any(), first, lambda: (jnp.zeros(rows.shape, jnp.int32), jnp.zeros(rows.shape, jnp.float32))
    )
    return cache, PassOutputs(logprobs=logprobs, first_tokens=first_tokens, first_logprobs=first_logprobs)


@partial(
    jax.jit,
    static_argnames=("config", "steps", "ends", "tempered"),
    donate_argnames=("cache",),
    compiler_options=COMPILER_OPTIONS,
)
def decode_block(
    cache: KVCache,
    params: Params,
    bank: Adapter,
    rows: DecodeBatch,
    settings: RowSettings,
    *,
    config: ModelConfig,
    steps: int,
    ends: tuple[int, ...] | None,
    tempered: bool,
) -> tuple[KVCache, BlockOutputs]:
    """Sample up to `steps` tokens for every row. A row that ends inside the block idles until its end.

    Attention reads each row's positions in segments that end at `ends`; every live row's position must lie within. However many segments
    there are, a row's result is the same to the bit. With None a GPU's kernel reads the pages as they lie, in `rows.stretches`.

    The block's own keys and values are kept apart from the cache until the end: each step then writes all rows at the same place, and
    the pages are read and written once per block instead of once per step.
    """
    config, batch = weight_stationary(config), rows.tokens.shape[0]
    adapter = replace(bank, head=replace(bank.head, users=rows.adapters))
    stacks = [stack for stack in stacks_of(config) for _ in stack.layers]
    adapters, apart = (
        bank_layers(bank, rows.adapters),
        None if reads_in_place(config) else by_layer(config, params),
    )
    tables = jnp.asarray(rows.tables)
    past = None if ends is None else read_rows(config, cache, tables, ends)
    past_positions = [jnp.arange(first, end)[None] for first, end in pairwise((0, *(ends or ())))]
    past_masks = [(keys < rows.positions[:, None])[:, None, None] for keys in past_positions]
    empty = jnp.zeros((batch, steps, config.num_kv_heads, config.head_dim), cache.keys.dtype)
    recent = [segment_of(empty, empty)] * config.num_layers

    def step(index: jax.Array, state: _BlockState) -> _BlockState:
        positions = rows.positions + index
        x = params.embed[state.last][:, None]
        ropes = ropes_of(config, positions[:, None], x.dtype)
        visible = (jnp.arange(steps) <= index)[None, None, None]
        written = []
        layers = (
            by_layer(config, params) if apart is None else apart
        )  # outside of the loop they would be copied
        for number, (stack, layer_weights, layer_adapter) in enumerate(
            zip(stacks, layers, adapters, strict=True)
        ):

            def attend(
                spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, number: int = number
            ) -> tuple[jax.Array, Segment]:
                recent = _append(state.recent[number], index, k, v)
                if past is None:
                    assert rows.stretches is not None
                    return attend_over_pages(
                        config, spec, cache, number, q, tables, rows.stretches, recent, visible
                    ), recent
                q = constrain(config.mesh, q, HEADS)
                masks = [*past_masks, visible]
                if spec.sliding_window is not None:
                    keys = [*past_positions, rows.positions[:, None] + jnp.arange(steps)]
                    first = (positions - spec.sliding_window)[:, None]
                    masks = [
                        mask & (key > first)[:, None, None] for mask, key in zip(masks, keys, strict=True)
                    ]
                return attend_over_segments(spec, q, [*past[number], recent], masks), recent

            x, layer_recent = layer(config, stack, x, layer_weights, layer_adapter, ropes, attend)
            written.append(layer_recent)
        hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
        logits = constrain(
            config.mesh, head_logits(config, params, adapter, hidden)[:, 0], PartitionSpec(BATCH)
        )
        chosen, logprobs = choose(logits, settings, positions + 1, tempered=tempered)
        live = state.remaining > 0
        stopped = (chosen[:, None] == rows.stop_tokens).any(axis=1)
        return _BlockState(
            last=jnp.where(live, chosen, state.last),
            remaining=jnp.where(stopped, 0, jnp.maximum(state.remaining - 1, 0)),
            recent=written,
            tokens=state.tokens.at[:, index].set(jnp.where(live, chosen, -1)),
            logprobs=state.logprobs.at[:, index].set(jnp.where(live, logprobs, 0.0)),
        )

    carried = rows.tokens < 0
    start = _BlockState(
        last=jnp.where(carried, rows.before.tokens, rows.tokens),
        remaining=jnp.where(carried & ~rows.before.going, 0, rows.remaining),
        recent=recent,
        tokens=jnp.full((batch, steps), -1, jnp.int32),
        logprobs=jnp.zeros((batch, steps), jnp.float32),
    )
    end = jax.lax.fori_loop(0, steps, step, start)
    counts = jnp.where(start.remaining > 0, steps, 0)
    cache = write_rows(
        config, cache, stacked(end.recent), rows.tables, rows.positions, counts, scatter=past is None
    )
    carry = keep_replicated(config, Carry(tokens=end.last, going=end.remaining > 0))
    return keep_cache(config, cache), BlockOutputs(tokens=end.tokens, logprobs=end.logprobs, carry=carry)


def choose(
    logits: jax.Array, settings: RowSettings, positions: ArrayLike, *, tempered: bool
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B] and their unfiltered logprobs [B] from float32 logits [B, V]; `positions` [B] are the new tokens' own."""
    random = settings.temperatures > 0
    filtered = random & ((settings.top_p < 1) | (settings.top_k < logits.shape[-1]))

    def perturb() -> jax.Array:
        scaled = logits / jnp.where(random, settings.temperatures, 1.0)[:, None]
        scaled = jax.lax.cond(filtered.any(), lambda: _filter(scaled, settings), lambda: scaled)
        return jnp.where(random[:, None], scaled + _noise(settings, positions, logits.shape[-1]), logits)

    tokens = _argmax(jax.lax.cond(random.any(), perturb, lambda: logits))
    if tempered:
        logits = logits / jnp.where(random, settings.temperatures, 1.0)[:, None]
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def _argmax(scores: jax.Array) -> jax.Array:
    """The first index [B] of each row's maximum, by two plain reductions: XLA's argmax is 10x slower on a CPU."""
    highest = scores.max(axis=-1, keepdims=True)
    indices = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    first = jnp.where(scores == highest, indices, scores.shape[-1]).min(axis=-1)
    return jnp.minimum(
        first, scores.shape[-1] - 1
    )  # NaN equals nothing; stay within the vocabulary all the same


def _noise(settings: RowSettings, positions: ArrayLike, vocab_size: int) -> jax.Array:
    """Gumbel noise [B, V]: its argmax with the logits is a draw from their softmax."""

    def row(seed: ArrayLike, index: ArrayLike, position: ArrayLike) -> jax.Array:
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32"), index),
            position,
        )
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(settings.seeds, settings.sample_indices, positions)


def _filter(tempered: jax.Array, settings: RowSettings) -> jax.Array:
    """Keep each row's `top_k` likeliest tokens, then the fewest of these that hold `top_p` of their probability; ties are kept."""
    ordered = jnp.sort(tempered, axis=-1, descending=True)
    ranks = jnp.arange(tempered.shape[-1])[None]
    top = jnp.where(ranks < settings.top_k[:, None], ordered, MASKED)
    probabilities = jax.nn.softmax(top, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (ranks < settings.top_k[:, None]) & ((before < settings.top_p[:, None]) | (ranks == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(tempered >= threshold, tempered, MASKED)


def _append(recent: Segment, index: jax.Array, k: jax.Array, v: jax.Array) -> Segment:
    """Each row's new key and value [B, 1, K, hd] at `index` of `recent`."""
    new = segment_of(k, v)
    return Segment(
        keys=jax.lax.dynamic_update_slice_in_dim(recent.keys, new.keys, index, axis=3),
        values=jax.lax.dynamic_update_slice_in_dim(recent.values, new.values, index, axis=2),
    )


def _prompt_logprobs(
    config: ModelConfig, params: Params, adapter: Adapter, hidden: jax.Array, targets: ArrayLike
) -> jax.Array:
    """[N, T] log p(targets) after every position of hidden [N, T, D]."""
    blocks, length = hidden.shape[:2]
    chunk = min(length, max(1, MAX_PROMPT_LOGITS // (blocks * config.vocab_size)))
    count = -(-length // chunk)
    padding = (0, count * chunk - length)
    targets = jnp.pad(targets, ((0, 0), padding)).reshape(blocks, count, chunk)
    states = jnp.pad(hidden, ((0, 0), padding, (0, 0))).reshape(blocks, count, chunk, -1)

    def of(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = head_logits(config, params, adapter, part[0])
        return jnp.take_along_axis(logits, part[1][..., None], axis=-1)[..., 0] - jax.nn.logsumexp(
            logits, axis=-1
        )

    return (
        jax.lax.map(of, (states.swapaxes(0, 1), targets.swapaxes(0, 1)))
        .swapaxes(0, 1)
        .reshape(blocks, -1)[:, :length]
    )
