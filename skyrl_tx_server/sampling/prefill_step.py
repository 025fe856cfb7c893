"""The prefill program, which computes tiles of prompts, writes their keys and values into KV pages and
samples the first tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from skyrl_tx_server.model.attention.prefill_attention import PrefillTiles, attend_to_pages
from skyrl_tx_server.model.families.layer_spec import LayerParams, Stack
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.kv_cache import KVCache, copy_pages, keep_cache, segment_of, write_layer
from skyrl_tx_server.model.layers import rms_norm
from skyrl_tx_server.model.lora.adapter import Adapter, LayerAdapter, slot_layer
from skyrl_tx_server.model.lora.lora_math import ArrayLike, LoraIndices
from skyrl_tx_server.model.mesh import on_gpu, weight_stationary
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig
from skyrl_tx_server.model.shapes import MIN_DECODE_WIDTH
from skyrl_tx_server.model.transformer import (
    SAMPLING_OPTIONS,
    Params,
    head_logits,
    layer,
    ropes_of,
    split_stack,
)
from skyrl_tx_server.sampling.token_sampling import BatchSettings, sample_tokens

MAX_PROMPT_LOGITS = 1 << 24
"""The maximum number of prompt logits in memory at once: 64 MiB in float32."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TileBatch:
    """N tiles of T prompt tokens that are computed together. The keys and values of the tokens before a tile
    are in their KV pages, or another tile of the batch computes them."""

    tokens: ArrayLike  # [N, T] int32, right-padded
    targets: ArrayLike  # [N, T] int32, the token after each token; 0 after the last token of a prompt
    tiles: PrefillTiles
    adapters: LoraIndices  # one LoRA slot per tile
    before: ArrayLike  # [C, 2] int32, at most C page copies before the computation (see `copy_pages`)
    after: ArrayLike  # [C, 2] int32, page copies after the computation
    want_logprobs: ArrayLike  # [] bool, whether any tile needs the logprobs of `targets`
    # For each of the B decode slots: the index of the last prompt token among the N * T tokens, and whether a
    # sequence begins in the slot, so that its first token is sampled.
    lasts: ArrayLike  # [B] int32
    begins: ArrayLike  # [B] bool
    sequence_adapters: LoraIndices  # one LoRA slot per sequence


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOutputs:
    """The outputs of a tile batch."""

    logprobs: ArrayLike  # [N, T] float32 of `targets`; zeros if not requested
    first_tokens: jax.Array  # [B] int32, the first token of each sequence that begins
    first_logprobs: jax.Array  # [B] float32


@partial(
    jax.jit,
    static_argnames=("config", "tempered"),
    donate_argnames=("cache",),
    compiler_options=SAMPLING_OPTIONS,
)
def prefill(
    cache: KVCache,
    params: Params,
    lora_slots: Adapter,
    batch: TileBatch,
    settings: BatchSettings,
    *,
    config: ModelConfig,
    tempered: bool,
) -> tuple[KVCache, PrefillOutputs]:
    """Compute a tile batch and sample the first token of each sequence that begins in one of the B
    slots. With `tempered`, the logprobs of sampled tokens are computed after temperature (see
    `token_sampling`)."""
    config, cache = weight_stationary(config), keep_cache(config, copy_pages(config, cache, batch.before))
    tokens, tiles = jnp.asarray(batch.tokens), batch.tiles
    x = params.embed[tokens]
    positions = tiles.starts[:, None] + jnp.arange(tokens.shape[1])
    ropes = ropes_of(config, positions, x.dtype)

    def body(
        stack: Stack,
        modules: LayerAdapter,
        unsliced: LayerParams,
        state: tuple[jax.Array, KVCache],
        weights: tuple[jax.Array, LayerParams],
    ) -> tuple[tuple[jax.Array, KVCache], None]:
        x, cache = state
        index, layer_params = weights
        adapter = slot_layer(modules, batch.adapters, index - stack.layers.start)

        def attend(
            spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> tuple[jax.Array, KVCache]:
            written = write_layer(
                config, cache, index, segment_of(k, v), tiles.tables, tiles.starts, tiles.lengths
            )
            return attend_to_pages(config, written, index, tiles, q, spec=spec), written

        return layer(config, stack, x, layer_params | unsliced, adapter, ropes, attend), None

    for stack, weights, modules in zip(stacks_of(config), params.layers, lora_slots.layers, strict=True):
        layers = jnp.arange(stack.layers.start, stack.layers.stop)
        sliced, unsliced = split_stack(config, weights)
        (x, cache), _ = jax.lax.scan(partial(body, stack, modules, unsliced), (x, cache), (layers, sliced))
    cache = keep_cache(config, copy_pages(config, cache, batch.after))

    hidden = rms_norm(x, params.final_norm, config.rms_norm_eps)
    logprobs = jax.lax.cond(
        batch.want_logprobs,
        lambda: _prompt_logprobs(
            config,
            params,
            replace(lora_slots, head=replace(lora_slots.head, indices=batch.adapters)),
            hidden,
            batch.targets,
        ),
        lambda: jnp.zeros(tokens.shape, jnp.float32),
    )

    first_tokens, first_logprobs = _first_tokens(
        config, params, lora_slots, batch, settings, hidden, positions, tempered=tempered
    )
    return cache, PrefillOutputs(logprobs=logprobs, first_tokens=first_tokens, first_logprobs=first_logprobs)


def _first_tokens(
    config: ModelConfig,
    params: Params,
    lora_slots: Adapter,
    batch: TileBatch,
    settings: BatchSettings,
    hidden: jax.Array,
    positions: ArrayLike,
    *,
    tempered: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the first token [B] of each sequence that begins and its logprob [B], from hidden states
    [N, T, D] at `positions` [N, T]. The values of other slots are undefined. If no sequence begins, the head
    is not computed.

    On a CPU without a mesh, the head is computed for only max(N, MIN_DECODE_WIDTH) of the B slots if at most
    that many sequences begin. Prompts that end in this batch have at least one of the N tiles each. If each
    of them has only one sample, at most N sequences therefore begin. On a GPU the head is computed for all B
    slots. This takes little time on a GPU, and the additional branch would make the device wait for the host.
    With a mesh the head is also computed for all B slots, because the slots are divided over the devices.
    """
    begins, lasts = jnp.asarray(batch.begins), jnp.asarray(batch.lasts)
    indices, nothing = batch.sequence_adapters, (jnp.zeros(begins.shape, jnp.int32), jnp.zeros(begins.shape))

    def sample(slots: jax.Array | slice) -> tuple[jax.Array, jax.Array]:
        slot_indices = replace(indices, slots=jnp.asarray(indices.slots)[slots])
        adapter = replace(lora_slots, head=replace(lora_slots.head, indices=slot_indices))
        states = hidden.reshape(-1, 1, hidden.shape[-1])[lasts[slots]]
        logits = head_logits(config, params, adapter, states)[:, 0]
        chosen = jax.tree.map(lambda setting: jnp.asarray(setting)[slots], settings)
        return sample_tokens(logits, chosen, positions.reshape(-1)[lasts[slots]] + 1, tempered=tempered)

    def sample_few() -> tuple[jax.Array, jax.Array]:
        slots = jnp.argsort(~begins, stable=True)[:few]  # the slots in which a sequence begins, then others
        tokens, logprobs = sample(slots)
        return nothing[0].at[slots].set(tokens), nothing[1].at[slots].set(logprobs)

    def sample_all() -> tuple[jax.Array, jax.Array]:
        return sample(slice(None))

    few = max(hidden.shape[0], MIN_DECODE_WIDTH)
    if on_gpu() or config.mesh is not None or few >= len(begins):
        return jax.lax.cond(begins.any(), sample_all, lambda: nothing)
    branch = jnp.where(begins.any(), jnp.where(begins.sum() <= few, 1, 2), 0)
    return jax.lax.switch(branch, [lambda: nothing, sample_few, sample_all])


def _prompt_logprobs(
    config: ModelConfig, params: Params, adapter: Adapter, hidden: jax.Array, targets: ArrayLike
) -> jax.Array:
    """Return log p(targets) [N, T] of hidden states [N, T, D]. Positions are processed in slices to limit
    memory."""
    tiles, length = hidden.shape[:2]
    chunk = min(length, max(1, MAX_PROMPT_LOGITS // (tiles * config.vocab_size)))
    count = -(-length // chunk)
    padding = (0, count * chunk - length)
    targets = jnp.pad(targets, ((0, 0), padding)).reshape(tiles, count, chunk)
    states = jnp.pad(hidden, ((0, 0), padding, (0, 0))).reshape(tiles, count, chunk, -1)

    def slice_logprobs(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = head_logits(config, params, adapter, part[0])
        chosen = jnp.take_along_axis(logits, part[1][..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    logprobs = jax.lax.map(slice_logprobs, (states.swapaxes(0, 1), targets.swapaxes(0, 1)))
    return logprobs.swapaxes(0, 1).reshape(tiles, -1)[:, :length]
