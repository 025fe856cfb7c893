"""The scoring program: the likeliest tokens, and chosen ones, at every position of a finished text.

Few requests ask for these, so they are a pass of their own over the text rather than a part of prefill and decoding, whose programs stay
as they are. It compiles once per padded length and number of tokens asked for, rounded up to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.engine.operations import NO_LOGPROB, CsrMatrix, TopkLogprobs
from skyrl_tx_server.model.attention.prefix_tree_attention import tree_attention
from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.lora.adapter import Adapter
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import to_host, weight_stationary
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import SCORED_BLOCK, pad_tokens
from skyrl_tx_server.model.transformer import COMPILER_OPTIONS, Params, Remat, head_logits, hidden_states

MAX_SCORE_LOGITS = 1 << 24
"""Logits held at once, 64 MiB in float32."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What is scored: row t of every output is about the token that follows tokens[: t + 1]."""

    tokens: ArrayLike  # [T] int32, right-padded to whole blocks
    length: ArrayLike  # [] int32
    adapter_index: ArrayLike  # [] int32, slot of the bank
    temperature: (
        ArrayLike  # [] float32, above 0; log-probabilities are those of softmax(logits / temperature)
    )
    targets: ArrayLike  # [T, K] int32; K may be 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    top_tokens: jax.Array  # [T, top] int32, likeliest first
    top_logprobs: jax.Array  # [T, top] float32
    target_logprobs: jax.Array  # [T, K] float32


@partial(jax.jit, static_argnames=("config", "top"), compiler_options=COMPILER_OPTIONS)
def score(params: Params, bank: Adapter, text: Text, *, config: ModelConfig, top: int) -> Scores:
    """The `top` likeliest tokens and the log-probabilities of the targets at every position."""
    config, adapter = weight_stationary(config), jax.tree.map(lambda leaf: leaf[text.adapter_index], bank)
    length = text.tokens.shape[0]
    positions = jnp.arange(length)
    attend = partial(tree_attention, config, _one_sequence(text))
    (hidden,) = hidden_states(
        config, params, adapter, text.tokens[None], positions[None], attend, remat=Remat.NOTHING
    )
    chunk = min(length, max(1, MAX_SCORE_LOGITS // config.vocab_size))
    count = -(-length // chunk)

    def split(array: ArrayLike) -> jax.Array:
        padded = jnp.pad(array, ((0, count * chunk - length), (0, 0)))
        return padded.reshape(count, chunk, array.shape[1])

    def of(part: tuple[jax.Array, jax.Array]) -> Scores:
        logits = head_logits(config, params, adapter, part[0][None])[0] / text.temperature
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        highest, tokens = jax.lax.top_k(logits, top)
        chosen = jnp.take_along_axis(logits, part[1], axis=-1)
        return Scores(top_tokens=tokens, top_logprobs=highest - total, target_logprobs=chosen - total)

    scores = jax.lax.map(of, (split(hidden), split(text.targets)))
    return jax.tree.map(lambda leaf: leaf.reshape(count * chunk, -1)[:length], scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """`score` for host data: pads, rounds up and cuts back."""

    config: ModelConfig
    params: Params
    lengths: tuple[int, ...]  # every padded length

    def run(
        self,
        bank: Adapter,
        adapter_index: int,
        tokens: np.ndarray,
        *,
        top: int = 0,
        targets: CsrMatrix | None = None,
        temperature: float = 1.0,
    ) -> tuple[TopkLogprobs, CsrMatrix | None]:
        """Of [N] tokens: the top-k after each, [N, top], and the log-probabilities of `targets`, whose row t follows tokens[: t + 1]."""
        padded = pad_tokens(tokens, self.lengths)
        matrix, columns = _side_by_side(targets, len(padded))
        text = Text(
            tokens=padded,
            length=np.array(len(tokens), np.int32),
            adapter_index=np.array(adapter_index, np.int32),
            temperature=np.array(temperature, np.float32),
            targets=matrix,
        )
        rounded = min(_power_of_two(top), self.config.vocab_size) if top else 0
        host = to_host(score(self.params, bank, text, config=self.config, top=rounded))
        topk = TopkLogprobs(
            token_ids=host.top_tokens[: len(tokens), :top], logprobs=host.top_logprobs[: len(tokens), :top]
        )
        if targets is None:
            return topk, None
        wanted = targets.values >= 0
        values = np.zeros(len(targets.values), np.float32)
        values[wanted] = host.target_logprobs[targets.rows()[wanted], columns]
        return topk, CsrMatrix(
            values=values,
            shape=targets.shape,
            crow_indices=targets.crow_indices,
            col_indices=targets.col_indices,
        )


def _one_sequence(text: Text) -> TreeLayout:
    """A stream of nothing but the text: every block looks at those up to itself, one of padding at none."""
    length = text.tokens.shape[0]
    blocks = np.arange(length // SCORED_BLOCK, dtype=np.int32)
    return TreeLayout(
        ends=np.full((1, length), length, np.int32),
        key_blocks=np.broadcast_to(blocks, (1, len(blocks), len(blocks))),
        num_key_blocks=jnp.where(blocks * SCORED_BLOCK < text.length, blocks + 1, 0)[None],
        positions=np.arange(length)[None],
    )


def at_prompt_positions(topk: TopkLogprobs) -> TopkLogprobs:
    """Moved from the token before to the token itself: the first of a prompt has no context, what follows the last is not asked for."""
    token_ids, logprobs = np.zeros_like(topk.token_ids), np.full_like(topk.logprobs, NO_LOGPROB)
    token_ids[1:], logprobs[1:] = topk.token_ids[:-1], topk.logprobs[:-1]
    return TopkLogprobs(token_ids=token_ids, logprobs=logprobs)


def _side_by_side(targets: CsrMatrix | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """([length, K] int32 of each row's wanted tokens from the left, the column in it of each wanted cell)."""
    if targets is None:
        return np.zeros((length, 0), np.int32), np.zeros(0, np.int64)
    wanted = targets.values >= 0
    rows = targets.rows()[wanted]
    columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
    matrix = np.zeros((length, _power_of_two(int(columns.max()) + 1)), np.int32)
    matrix[rows, columns] = targets.values[wanted]
    return matrix, columns


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
