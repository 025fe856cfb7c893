"""The sampling programs: prefill a prompt into slots, decode a block of steps over all slots.

Every setting of a row is an array, so requests with different settings share a batch and compile nothing. A sampled token's logprob is of
the model's own distribution (temperature 1), or of the `tempered` one it was drawn from where the server is set to that; filters (top-k,
top-p) never count, greedy rows and prompts are always at temperature 1. All in float32.

The randomness of a token depends on its request's seed, the sample's index and the token's position, never on the batch:
key = fold_in(fold_in(seed, index), position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.families import stacks_of
from skyrl_tx_server.model.family import LayerParams, Stack
from skyrl_tx_server.model.kv_cache import (
    KVCache,
    Segment,
    join,
    keep_cache,
    read_slot,
    segment_of,
    segment_starts,
    write_block,
    write_prompt,
)
from skyrl_tx_server.model.layers import packed_attention, rms_norm, rope_tables
from skyrl_tx_server.model.lora import Adapter, LayerAdapter, bank_layers
from skyrl_tx_server.model.low_rank import Leaf, Users
from skyrl_tx_server.model.transformer import Params, by_layer, head_logits, layer

MAX_STOP_TOKENS = 16
MAX_PROMPT_LOGITS = 1 << 24
"""Prompt logits held at once, 64 MiB in float32."""
QUERY_BLOCK = 256
"""Prompt tokens whose attention scores over a cached prefix are in memory at once."""
MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How each row is sampled; every array has a leading row axis B."""

    seeds: Leaf  # [B, 2] uint32, high and low half of the request's 64-bit seed
    sample_indices: Leaf  # [B] int32, which sample of its request
    temperatures: Leaf  # [B] float32, 0 is greedy
    top_k: Leaf  # [B] int32, the vocabulary size is off
    top_p: Leaf  # [B] float32, 1 is off


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt and the rows that continue it. Its first `cached` tokens lie in the cache already, in slot `source`."""

    tokens: Leaf  # [T] int32, what follows the cached tokens, right-padded
    length: Leaf  # [] int32, tokens that count in `tokens`
    cached: Leaf  # [] int32
    source: Leaf  # [] int32
    adapter_index: Leaf  # [] int32, slot of the bank
    slots: Leaf  # [B] int32; the first `num_slots` count
    num_slots: Leaf  # [] int32
    want_logprobs: Leaf  # [] bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOutputs:
    """What a prefill returns to the host."""

    logprobs: jax.Array  # [T] float32; entry t is log p(tokens[t + 1] | tokens[: t + 1]); zeros when not wanted
    first_tokens: jax.Array  # [B] int32, the first completion token of each of the prompt's rows
    first_logprobs: jax.Array  # [B] float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The decode slots at the start of a block."""

    tokens: Leaf  # [B] int32, the last token of each row, not in the cache yet
    positions: Leaf  # [B] int32, that token's position = tokens in the cache; the cache's length for a free slot, which is left as it is
    remaining: Leaf  # [B] int32, tokens still to sample; 0 for a free slot
    adapters: Users  # of the bank
    stop_tokens: Leaf  # [B, MAX_STOP_TOKENS] int32, padded with -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOutputs:
    """What a decode block returns to the host; a row's tokens beyond its end are -1."""

    tokens: jax.Array  # [B, steps] int32
    logprobs: jax.Array  # [B, steps] float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockState:
    """A decode block on its way."""

    tokens: jax.Array  # [B] int32, each row's last
    remaining: jax.Array  # [B] int32
    recent: list[Segment]  # by layer, the block's own positions
    outputs: BlockOutputs


@partial(jax.jit, static_argnames=("config", "segments", "tempered"), donate_argnames=("cache",))
def prefill(
    cache: KVCache,
    params: Params,
    bank: Adapter,
    prompt: Prompt,
    settings: RowSettings,
    *,
    config: ModelConfig,
    segments: int,
    tempered: bool,
) -> tuple[KVCache, PromptOutputs]:
    """Run a prompt once, copy its keys and values to its rows' slots, and sample each row's first token.

    The cached tokens must lie within the first `segments` segments; 0 when there are none.
    """
    adapter = jax.tree.map(lambda leaf: leaf[prompt.adapter_index], bank)
    tokens = jnp.asarray(prompt.tokens)[None]
    length = tokens.shape[1]
    x = params.embed[tokens]
    rope = rope_tables(config, prompt.cached + jnp.arange(length)[None], x.dtype)

    def attend(past: Segment | None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Segment]:
        if past is None:  # padding comes last, where causality hides it
            return packed_attention(q, k, v, jnp.ones_like(tokens)), segment_of(k, v)
        return _attend_to_past(q, k, v, past, prompt.cached), join(past, segment_of(k, v), prompt.cached)

    def body(stack: Stack, x: jax.Array, weights: tuple[LayerParams, LayerAdapter, Segment | None]) -> tuple[jax.Array, Segment]:
        return layer(config, stack, x, *weights[:2], rope, partial(attend, weights[2]))

    written: tuple[Segment, ...] = ()  # by stack
    for stack, weights, modules in zip(stacks_of(config), params.layers, adapter.layers, strict=True):
        layers = cache[stack.layers.start : stack.layers.stop]
        past = read_slot(config, layers, prompt.source, segments) if segments else None
        x, segment = jax.lax.scan(partial(body, stack), x, (weights, modules, past))
        written = (*written, segment)
    cache = keep_cache(config, write_prompt(config, cache, by_layer(config, written), prompt.slots, prompt.num_slots))

    hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
    logprobs = jax.lax.cond(
        prompt.want_logprobs,
        lambda: _prompt_logprobs(config, params, adapter, hidden, tokens),
        lambda: jnp.zeros(length, jnp.float32),
    )
    last = jax.lax.dynamic_slice_in_dim(hidden, prompt.length - 1, 1, axis=1)
    logits = head_logits(config, params, adapter, last)[:, 0]
    rows = prompt.slots.shape[0]
    first_tokens, first_logprobs = choose(
        jnp.broadcast_to(logits, (rows, logits.shape[1])),
        settings,
        jnp.broadcast_to(prompt.cached + prompt.length, (rows,)),
        tempered=tempered,
    )
    return cache, PromptOutputs(logprobs=logprobs, first_tokens=first_tokens, first_logprobs=first_logprobs)


@partial(jax.jit, static_argnames=("config", "steps", "segments", "tempered"), donate_argnames=("cache",))
def decode_block(
    cache: KVCache,
    params: Params,
    bank: Adapter,
    rows: Rows,
    settings: RowSettings,
    *,
    config: ModelConfig,
    steps: int,
    segments: int,
    tempered: bool,
) -> tuple[KVCache, BlockOutputs]:
    """Sample up to `steps` tokens for every row. A row that ends inside the block idles until its end.

    Attention reads the first `segments` segments of the cache; every live row's position must lie within.

    The block's own keys and values are kept apart from the cache until the end: each step then writes all rows at the same place, and
    the cache is written once per block instead of once per step.
    """
    batch = rows.tokens.shape[0]
    adapter = replace(bank, head=replace(bank.head, users=rows.adapters))
    stacks = [stack for stack in stacks_of(config) for _ in stack.layers]
    layers = list(zip(stacks, by_layer(config, params.layers), bank_layers(bank, rows.adapters), strict=True))
    past = [layer_segments[:segments] for layer_segments in cache]
    past_masks = [
        (first + jnp.arange(segment.keys.shape[-1])[None] < rows.positions[:, None])[:, None, None]
        for first, segment in zip(segment_starts(past[0]), past[0], strict=True)
    ]
    empty_keys = jnp.zeros((batch, steps, config.num_kv_heads, config.head_dim), cache[0][0].keys.dtype)
    recent = [segment_of(empty_keys, empty_keys)] * config.num_layers
    outputs = BlockOutputs(tokens=jnp.full((batch, steps), -1, jnp.int32), logprobs=jnp.zeros((batch, steps), jnp.float32))

    def step(index: jax.Array, state: _BlockState) -> _BlockState:
        positions = rows.positions + index
        x = params.embed[state.tokens][:, None]
        rope = rope_tables(config, positions[:, None], x.dtype)
        masks = [*past_masks, (jnp.arange(steps) <= index)[None, None, None]]
        written = []
        for layer_past, layer_recent, (stack, layer_weights, layer_adapter) in zip(past, state.recent, layers, strict=True):
            attend = partial(_attend_and_append, layer_past, layer_recent, masks, index)
            x, layer_recent = layer(config, stack, x, layer_weights, layer_adapter, rope, attend)
            written.append(layer_recent)
        hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
        logits = head_logits(config, params, adapter, hidden)[:, 0]
        chosen, logprobs = choose(logits, settings, positions + 1, tempered=tempered)
        live = state.remaining > 0
        stopped = (chosen[:, None] == rows.stop_tokens).any(axis=1)
        return _BlockState(
            tokens=jnp.where(live, chosen, state.tokens),
            remaining=jnp.where(stopped, 0, jnp.maximum(state.remaining - 1, 0)),
            recent=written,
            outputs=BlockOutputs(
                tokens=state.outputs.tokens.at[:, index].set(jnp.where(live, chosen, -1)),
                logprobs=state.outputs.logprobs.at[:, index].set(jnp.where(live, logprobs, 0.0)),
            ),
        )

    start = _BlockState(tokens=jnp.asarray(rows.tokens), remaining=jnp.asarray(rows.remaining), recent=recent, outputs=outputs)
    end = jax.lax.fori_loop(0, steps, step, start)
    return keep_cache(config, write_block(config, cache, end.recent, rows.positions)), end.outputs


def choose(logits: jax.Array, settings: RowSettings, positions: Leaf, *, tempered: bool) -> tuple[jax.Array, jax.Array]:
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
    return jnp.minimum(first, scores.shape[-1] - 1)  # NaN equals nothing; stay within the vocabulary all the same


def _noise(settings: RowSettings, positions: Leaf, vocab_size: int) -> jax.Array:
    """Gumbel noise [B, V]: its argmax with the logits is a draw from their softmax."""

    def row(seed: Leaf, index: Leaf, position: Leaf) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32"), index), position)
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


def _attend_and_append(
    past: Sequence[Segment], recent: Segment, masks: Sequence[jax.Array], index: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Segment]:
    """Put each row's new key and value [B, 1, K, hd] at `index` of `recent`, then attend q [B, 1, H, hd] to `past` and `recent`."""
    new = segment_of(k, v)
    recent = Segment(
        keys=jax.lax.dynamic_update_slice_in_dim(recent.keys, new.keys, index, axis=3),
        values=jax.lax.dynamic_update_slice_in_dim(recent.values, new.values, index, axis=2),
    )
    return _attend(q, [*past, recent], masks), recent


def _attend_to_past(q: jax.Array, k: jax.Array, v: jax.Array, past: Segment, cached: Leaf) -> jax.Array:
    """Causal attention of new tokens, q [1, T, H, hd], over the first `cached` positions of `past` and over themselves."""
    old = past.keys.shape[-1]
    keys = jnp.concatenate([past.keys.transpose(0, 3, 1, 2), k], axis=1)
    values = jnp.concatenate([past.values.transpose(0, 2, 1, 3), v], axis=1)
    columns = jnp.arange(keys.shape[1])
    visible = jnp.where(columns < old, columns < cached, columns - old <= jnp.arange(q.shape[1])[:, None])
    blocks = [
        jax.nn.dot_product_attention(q[:, at : at + QUERY_BLOCK], keys, values, mask=visible[None, None, at : at + QUERY_BLOCK])
        for at in range(0, q.shape[1], QUERY_BLOCK)
    ]
    return jnp.concatenate(blocks, axis=1)


def _attend(q: jax.Array, segments: Sequence[Segment], masks: Sequence[jax.Array]) -> jax.Array:
    """One query per row over segments laid end to end; masks broadcast to [B, K, G, n]. Softmax in float32."""
    batch, _, heads, head_dim = q.shape
    kv_heads = segments[0].keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = [
        jnp.where(mask, jnp.einsum("bkgh,bkhs->bkgs", grouped, segment.keys, preferred_element_type=jnp.float32) * head_dim**-0.5, MASKED)
        for segment, mask in zip(segments, masks, strict=True)
    ]
    highest = jnp.stack([score.max(axis=-1) for score in scores]).max(axis=0)[..., None]
    weights = [jnp.exp(score - highest) for score in scores]
    total = sum((weight.sum(axis=-1, keepdims=True) for weight in weights), start=jnp.zeros((), jnp.float32))
    attended = sum(
        (
            jnp.einsum("bkgs,bksh->bkgh", weight.astype(q.dtype), segment.values, preferred_element_type=jnp.float32)
            for weight, segment in zip(weights, segments, strict=True)
        ),
        start=jnp.zeros((), jnp.float32),
    )
    return (attended / total).astype(q.dtype).reshape(batch, 1, heads, head_dim)


def _prompt_logprobs(config: ModelConfig, params: Params, adapter: Adapter, hidden: jax.Array, tokens: Leaf) -> jax.Array:
    """[P] log p(next token) at every position of hidden [1, P, D]; the last entry, which has no next token, means nothing."""
    length = tokens.shape[1]
    chunk = min(length, max(1, MAX_PROMPT_LOGITS // config.vocab_size))
    count = -(-length // chunk)
    targets = jnp.pad(jnp.roll(tokens[0], -1), (0, count * chunk - length)).reshape(count, chunk)
    states = jnp.pad(hidden[0], ((0, count * chunk - length), (0, 0))).reshape(count, 1, chunk, -1)

    def of(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = head_logits(config, params, adapter, part[0])[0]
        return jnp.take_along_axis(logits, part[1][:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)

    return jax.lax.map(of, (states, targets)).reshape(-1)[:length]
