"""Sampling of tokens from logits, for a batch of sequences with different settings. All computations are in
float32.

Every setting is an array, so requests with different settings share a batch and a compiled program. The
logprob of a sampled token is computed from the model's distribution at temperature 1. With `tempered`
(`logprobs_mode=processed`), it is computed from the distribution at the temperature of the request, except
for greedy sequences. The filters top-k and top-p never change a logprob.

The random numbers of a token depend only on the seed of its request, the index of its sequence and its
position, never on the batch: key = fold_in(fold_in(seed, index), position).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx_server.model.attention.softmax import MASKED
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.reductions import logsumexp, softmax


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The sampling settings of a batch. Every array has a leading axis B of slots."""

    seeds: ArrayLike  # [B, 2] uint32, high and low half of the request's 64-bit seed
    sample_indices: ArrayLike  # [B] int32, index of the sequence in its request
    temperatures: ArrayLike  # [B] float32; 0: greedy
    top_k: ArrayLike  # [B] int32; the vocabulary size: no filter
    top_p: ArrayLike  # [B] float32; 1: no filter


def is_filtered(settings: BatchSettings, random: ArrayLike, vocab_size: int) -> ArrayLike:
    """Return whether top-k or top-p can mask a token, for each slot [B]. `random` [B] states which slots have
    a temperature above 0."""
    return random & ((settings.top_p < 1) | (settings.top_k < vocab_size))


def sample_tokens(
    logits: jax.Array,
    settings: BatchSettings,
    positions: ArrayLike,
    *,
    tempered: bool,
    filters: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return tokens [B] int32 and their logprobs [B] for float32 logits [B, V] (V: vocabulary size).

    `positions` [B] are the positions of the new tokens. With `tempered`, the logprobs are computed after
    temperature. `filters` states whether the program applies top-k and top-p. If it is None, the device tests
    whether a slot of the batch uses a filter, and whether a slot has a temperature above 0. A GPU waits for
    the host at these tests, so decode dispatches on a GPU set `filters`.
    """
    random = settings.temperatures > 0
    filtered = is_filtered(settings, random, logits.shape[-1])

    def perturb() -> jax.Array:
        scaled = logits / jnp.where(random, settings.temperatures, 1.0)[:, None]
        if filters is None:
            scaled = jax.lax.cond(filtered.any(), lambda: _filter(scaled, settings), lambda: scaled)
        elif filters:
            scaled = _filter(scaled, settings)
        return jnp.where(
            random[:, None], scaled + _gumbel_noise(settings, positions, logits.shape[-1]), logits
        )

    scores = jax.lax.cond(random.any(), perturb, lambda: logits) if filters is None else perturb()
    tokens = _argmax(scores)
    if tempered:
        logits = logits / jnp.where(random, settings.temperatures, 1.0)[:, None]
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - logsumexp(logits)[:, 0]


def _argmax(scores: jax.Array) -> jax.Array:
    """Return the index [B] of the maximum of each row. If several scores are equal to the maximum, return the
    first index. The function uses two reductions, because XLA's argmax takes ten times as long on a CPU."""
    highest = scores.max(axis=-1, keepdims=True)
    indices = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    first = jnp.where(scores == highest, indices, scores.shape[-1]).min(axis=-1)
    return jnp.minimum(first, scores.shape[-1] - 1)  # keeps the index valid if a score is NaN


def _gumbel_noise(settings: BatchSettings, positions: ArrayLike, vocab_size: int) -> jax.Array:
    """Return Gumbel noise [B, V]. The argmax of logits plus noise is a draw from their softmax."""

    def noise(seed: ArrayLike, index: ArrayLike, position: ArrayLike) -> jax.Array:
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32"), index),
            position,
        )
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(noise)(settings.seeds, settings.sample_indices, positions)


def _filter(scaled: jax.Array, settings: BatchSettings) -> jax.Array:
    """Keep the `top_k` most likely tokens and normalize their probabilities. Of these tokens, keep the
    smallest set whose probability is at least `top_p`. Mask all other tokens, except tokens that are as
    likely as the least likely token of the set."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    ranks = jnp.arange(scaled.shape[-1])[None]
    top = jnp.where(ranks < settings.top_k[:, None], ordered, MASKED)
    probabilities = softmax(top)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # Without the last condition, rounding of the cumulative sum would mask tokens of a row with top_p=1.
    in_top_p = (before < settings.top_p[:, None]) | (ranks == 0) | (settings.top_p[:, None] >= 1)
    kept = (ranks < settings.top_k[:, None]) & in_top_p
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= threshold, scaled, MASKED)
