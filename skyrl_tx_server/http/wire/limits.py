"""Limits of requests, and checks that several request parsers share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.json_reader import JsonReader
from skyrl_tx_server.http.wire.tensors import integers

MAX_TOP_K = 1024
"""Maximum number of tokens per position: in the top-k logprobs of a sample request, in its
`target_prompt_logprobs`, and in the `target_tokens` of a datum. It does not limit the sampling filter
`top_k`."""
MAX_SEED = 2**63 - 1
TEN_YEARS_S = 315_360_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes of the model and options of the server that limit requests."""

    vocab_size: int
    max_context_length: int  # tokens of prompt and completion together
    max_lora_rank: int


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= TEN_YEARS_S:
        raise UserError(
            f"ttl_seconds={ttl_seconds} must lie between 1 and {TEN_YEARS_S} (ten years); leave it out to "
            f"keep the checkpoint"
        )
    return ttl_seconds


def check_tokens(tokens: np.ndarray, where: str, limits: Limits) -> np.ndarray:
    """Return token ids of any shape as int32. Raise UserError if one is outside the vocabulary."""
    if tokens.size and (tokens.min() < 0 or tokens.max() >= limits.vocab_size):
        invalid_token = int(tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0])
        raise UserError(
            f"{where}: token {invalid_token} is outside this model's vocabulary of {limits.vocab_size}; use "
            "the model's own tokenizer"
        )
    return tokens.astype(np.int32)


def parse_model_input(body: object, where: str, limits: Limits) -> np.ndarray:
    """Return the tokens of all chunks of a ModelInput as one flat int32 array. Raise UserError for a chunk
    that is not text, and for a token outside the vocabulary."""
    fields = JsonReader(body, where)
    parts = [np.zeros(0, np.int64)]
    for chunk_body in fields.items("chunks"):
        chunk = JsonReader(chunk_body, f"{where} chunk")
        kind = chunk.optional_text("type") or "encoded_text"
        if kind != "encoded_text":
            raise UserError(
                f"{where}: {kind} chunks are not supported by this text-only server; send encoded_text tokens"
            )
        parts.append(integers(chunk.items("tokens"), where))
        chunk.finish()
    fields.finish()
    return check_tokens(np.concatenate(parts), where, limits)
