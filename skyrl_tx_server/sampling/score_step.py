"""The scoring program computes the likeliest tokens and the logprobs of target tokens at every position of a
complete text.

Few requests need these values. Therefore a separate program computes them from the text, so that the prefill
and decode programs stay simple. The scoring program is compiled once for each combination of padded length,
number of likeliest tokens and number of targets per position. The number of likeliest tokens and the number
of targets are rounded up to powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx_server.engine.operations import NO_LOGPROB, CsrMatrix, TopkLogprobs
from skyrl_tx_server.model.attention.prefix_tree_attention import tree_attention
from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.lora.adapter import Adapter
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import to_host, weight_stationary
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import ATTENTION_TILE, pad_tokens
from skyrl_tx_server.model.transformer import COMPILER_OPTIONS, Params, Remat, head_logits, hidden_states

MAX_SCORE_LOGITS = 1 << 24
"""The maximum number of logits in memory at once: 64 MiB in float32."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreInputs:
    """The text to score. Index t of every output describes the token that follows tokens[: t + 1]."""

    tokens: ArrayLike  # [T] int32, right-padded to whole attention tiles
    length: ArrayLike  # [] int32
    adapter_index: ArrayLike  # [] int32, LoRA slot
    temperature: ArrayLike  # [] float32, above 0; logprobs are log_softmax(logits / temperature)
    targets: ArrayLike  # [T, K] int32, target tokens; K may be 0


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The outputs for each position of the padded text."""

    top_tokens: jax.Array  # [T, top] int32, likeliest first
    top_logprobs: jax.Array  # [T, top] float32
    target_logprobs: jax.Array  # [T, K] float32


@partial(jax.jit, static_argnames=("config", "top"), compiler_options=COMPILER_OPTIONS)
def score(
    params: Params, lora_slots: Adapter, inputs: ScoreInputs, *, config: ModelConfig, top: int
) -> Scores:
    """Return the `top` likeliest tokens and the logprobs of the targets at every position."""
    config = weight_stationary(config)
    adapter = jax.tree.map(lambda leaf: leaf[inputs.adapter_index], lora_slots)
    length = inputs.tokens.shape[0]
    positions = jnp.arange(length)
    attend = partial(tree_attention, config, _single_sequence(inputs))
    (hidden,) = hidden_states(
        config, params, adapter, inputs.tokens[None], positions[None], attend, remat=Remat.NOTHING
    )
    chunk = min(length, max(1, MAX_SCORE_LOGITS // config.vocab_size))
    count = -(-length // chunk)

    def split(array: ArrayLike) -> jax.Array:
        padded = jnp.pad(array, ((0, count * chunk - length), (0, 0)))
        return padded.reshape(count, chunk, array.shape[1])

    def score_chunk(part: tuple[jax.Array, jax.Array]) -> Scores:
        logits = head_logits(config, params, adapter, part[0][None])[0] / inputs.temperature
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        highest, tokens = jax.lax.top_k(logits, top)
        chosen = jnp.take_along_axis(logits, part[1], axis=-1)
        return Scores(top_tokens=tokens, top_logprobs=highest - total, target_logprobs=chosen - total)

    scores = jax.lax.map(score_chunk, (split(hidden), split(inputs.targets)))
    return jax.tree.map(lambda leaf: leaf.reshape(count * chunk, -1)[:length], scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Runs `score` on host arrays: pads the inputs and removes the padding from the outputs."""

    config: ModelConfig
    params: Params
    lengths: tuple[int, ...]  # all padded lengths

    def run(
        self,
        lora_slots: Adapter,
        adapter_index: int,
        tokens: np.ndarray,
        *,
        top: int = 0,
        targets: CsrMatrix | None = None,
        temperature: float = 1.0,
    ) -> tuple[TopkLogprobs, CsrMatrix | None]:
        """Return the `top` likeliest tokens after each of the [N] tokens, and the logprobs of `targets`. The
        tokens in row t of `targets` are scored as successors of token t. -1 in `targets` means no token, and
        its result is 0."""
        padded = pad_tokens(tokens, self.lengths)
        matrix, columns = _dense_targets(targets, len(padded))
        inputs = ScoreInputs(
            tokens=padded,
            length=np.array(len(tokens), np.int32),
            adapter_index=np.array(adapter_index, np.int32),
            temperature=np.array(temperature, np.float32),
            targets=matrix,
        )
        rounded = min(_power_of_two(top), self.config.vocab_size) if top else 0
        scores = to_host(score(self.params, lora_slots, inputs, config=self.config, top=rounded))
        topk = TopkLogprobs(
            token_ids=scores.top_tokens[: len(tokens), :top],
            logprobs=scores.top_logprobs[: len(tokens), :top],
        )
        if targets is None:
            return topk, None
        is_target = targets.values >= 0
        values = np.zeros(len(targets.values), np.float32)
        values[is_target] = scores.target_logprobs[targets.rows()[is_target], columns]
        return topk, CsrMatrix(
            values=values,
            shape=targets.shape,
            crow_indices=targets.crow_indices,
            col_indices=targets.col_indices,
        )


def _single_sequence(inputs: ScoreInputs) -> TreeLayout:
    """Return the layout for which `tree_attention` computes the attention of one sequence. Each tile attends
    to itself and all tiles before it. Tiles of padding attend to none."""
    length = inputs.tokens.shape[0]
    tiles = np.arange(length // ATTENTION_TILE, dtype=np.int32)
    return TreeLayout(
        subtree_end=np.full((1, length), length, np.int32),
        key_blocks=np.broadcast_to(tiles, (1, len(tiles), len(tiles))),
        num_key_blocks=jnp.where(tiles * ATTENTION_TILE < inputs.length, tiles + 1, 0)[None],
        positions=np.arange(length)[None],
    )


def at_prompt_positions(topk: TopkLogprobs) -> TopkLogprobs:
    """Shift `topk` by one position, so that row t describes token t instead of its successor. Row 0 is filled
    with NO_LOGPROB, because the first token has no context. The last row of `topk` is dropped."""
    token_ids, logprobs = np.zeros_like(topk.token_ids), np.full_like(topk.logprobs, NO_LOGPROB)
    token_ids[1:], logprobs[1:] = topk.token_ids[:-1], topk.logprobs[:-1]
    return TopkLogprobs(token_ids=token_ids, logprobs=logprobs)


def _dense_targets(targets: CsrMatrix | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix [length, K] int32 in which the targets of each row start at column 0, and the column of
    each target in this matrix. Both results leave out the values of `targets` that are -1."""
    if targets is None:
        return np.zeros((length, 0), np.int32), np.zeros(0, np.int64)
    is_target = targets.values >= 0
    rows = targets.rows()[is_target]
    columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
    matrix = np.zeros((length, _power_of_two(int(columns.max()) + 1)), np.int32)
    matrix[rows, columns] = targets.values[is_target]
    return matrix, columns


def _power_of_two(minimum: int) -> int:
    return 1 << (minimum - 1).bit_length()
