"""The state of a sequence: its settings, tokens and KV pages. A sequence is one completion of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.engine.operations import DEFAULT_TENANT, MAX_STOP_TOKENS, SamplingSettings, StopReason
from skyrl_tx_server.engine.stop_strings import find_stop
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.sampling.token_sampling import BatchSettings

type SequenceKey = tuple[int, int]
"""(request_id, index of the sequence in its request); smaller keys are older."""


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """A sequence that is in a decode slot, preempted or paused."""

    request_id: int
    index: int  # index of the sequence in its request
    tenant: str = DEFAULT_TENANT
    weights: str | None  # name of the sampler snapshot; None: the base model
    adapter_slot: int
    settings: SamplingSettings
    seed: int  # 64 bits
    stop_tokens: tuple[int, ...]
    prompt: np.ndarray  # [P] int32
    max_tokens: int
    topk: int  # number of likeliest tokens to report at each sampled position
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Empty if the sequence was preempted, or if it is paused and its pages were reclaimed.
    block_table: list[int] = field(default_factory=list)
    dispatches_preempted: int = 0  # number of decode dispatches since the preemption
    pending_tokens: int = 0  # number of tokens that the dispatch in flight adds if the sequence does not end

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.index

    @property
    def position(self) -> int:
        """The position that the last token will have when the dispatch in flight has ended."""
        return len(self.prompt) + len(self.tokens) + self.pending_tokens - 1

    @property
    def remaining(self) -> int:
        """The number of tokens that may follow the dispatch in flight; below 1 if the sequence must end in
        that dispatch."""
        return self.max_tokens - len(self.tokens) - self.pending_tokens

    @property
    def text(self) -> np.ndarray:
        """The prompt and the sampled tokens, [P + n] int32."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def cached_tokens(self) -> np.ndarray:
        """The tokens whose keys and values are in the pages: all except the last token, which is the input of
        the next decode step."""
        return self.text[:-1]

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer | None
    ) -> tuple[int, StopReason] | None:
        """Append sampled tokens. Return (number of tokens in the result, reason) if the sequence is complete,
        otherwise None.

        Raises UserError if a logprob is NaN, which means that the weights have diverged, that the files of
        the model are damaged or that its numbers are too large for the dtype of the server.
        """
        if np.isnan(logprobs).any():
            raise UserError(_nan_message(self.weights))
        self.tokens += tokens
        self.logprobs += logprobs
        length = len(self.tokens)
        if self.settings.stop_strings:
            assert tokenizer is not None
            stop_length = find_stop(tokenizer, self.tokens, self.settings.stop_strings, new=len(tokens))
            if stop_length is not None:
                return stop_length, StopReason.STOP
        if self.tokens[-1] in self.stop_tokens:
            return length, StopReason.STOP
        return (length, StopReason.LENGTH) if length >= self.max_tokens else None


def batch_settings(sequences: Sequence[SequenceState | None], vocab_size: int) -> BatchSettings:
    """Return the sampling settings of each slot as arrays. Free slots are greedy and unfiltered, because
    these settings cost no time."""
    settings = BatchSettings(
        seeds=np.zeros((len(sequences), 2), np.uint32),
        sample_indices=np.zeros(len(sequences), np.int32),
        temperatures=np.zeros(len(sequences), np.float32),
        top_k=np.full(len(sequences), vocab_size, np.int32),
        top_p=np.ones(len(sequences), np.float32),
    )
    for slot, sequence in enumerate(sequences):
        if sequence is not None:
            top_k = sequence.settings.top_k
            settings.seeds[slot] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
            settings.sample_indices[slot] = sequence.index
            settings.temperatures[slot] = sequence.settings.temperature
            settings.top_k[slot] = min(top_k, vocab_size) if top_k > 0 else vocab_size
            settings.top_p[slot] = sequence.settings.top_p
    return settings


def _nan_message(weights: str | None) -> str:
    if weights is None:
        return (
            "sampling from the base model: the probabilities are NaN, because its files are damaged or its "
            "numbers are too large for the dtype of the server; download the model again, or start the "
            "server with dtype=float32"
        )
    return (
        f"sampling from {weights}: the probabilities are NaN, because the weights have diverged; load an "
        "earlier checkpoint and lower the learning rate"
    )


def stop_tokens_of(settings: SamplingSettings, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a sequence. Raises UserError if there are too many."""
    tokens = {*settings.stop_token_ids, *(config.eos_token_ids if settings.stop_at_eos else ())}
    if len(tokens) > MAX_STOP_TOKENS:
        raise UserError(
            f"the request has {len(tokens)} stop tokens, including the end tokens of the model; at most "
            f"{MAX_STOP_TOKENS} are supported"
        )
    return tuple(sorted(tokens))
