"""A running sample: what was asked for, what it has so far, and whether it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.engine.operations import DEFAULT_TENANT, SamplingSettings, StopReason
from skyrl_tx_server.engine.stop_strings import find_stop
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.sampling.sample_step import MAX_STOP_TOKENS, RowSettings

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024
"""All are looked for after every decode block, by the thread that keeps the devices busy."""


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceState:
    """One of the samples of a request, alive or set aside."""

    request_id: int
    index: int  # which sample of its request
    tenant: str = DEFAULT_TENANT
    weights: str | None
    adapter_slot: int
    settings: SamplingSettings
    seed: int  # 64 bits
    stop_tokens: tuple[int, ...]
    prompt: np.ndarray  # [P] int32
    max_tokens: int
    topk: int  # likeliest tokens to report at each of its tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # of its keys and values; none while it is set aside
    blocks_aside: int = 0  # that were decoded while it was set aside
    coming: int = 0  # tokens that the block under way brings, unless the row ends in it

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def position(self) -> int:
        """Of its last token, after the block under way."""
        return self.length + self.coming - 1

    @property
    def remaining(self) -> int:
        """Tokens it may still sample, after the block under way; less than one where it ends in it."""
        return self.max_tokens - len(self.tokens) - self.coming

    @property
    def text(self) -> np.ndarray:
        """[P + n] int32"""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def cached_tokens(self) -> np.ndarray:
        """All but the last, which the next step computes."""
        return self.text[:-1]

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer | None
    ) -> tuple[int, StopReason] | None:
        """Append what was sampled; (how many of its tokens count, why) once the row is complete. UserError where weights have diverged."""
        if np.isnan(logprobs).any():
            raise UserError(
                f"sampling from {self.weights or 'the base model'}: its probabilities are not numbers, so its weights have diverged; "
                "go back to an earlier checkpoint and lower the learning rate"
            )
        self.tokens += tokens
        self.logprobs += logprobs
        length = len(self.tokens)
        if self.settings.stop_strings:
            assert tokenizer is not None
            cut = find_stop(tokenizer, self.tokens, self.settings.stop_strings, new=len(tokens))
            if cut is not None:
                return cut, StopReason.STOP
        if self.tokens[-1] in self.stop_tokens:
            return length, StopReason.STOP
        return (length, StopReason.LENGTH) if length >= self.max_tokens else None


def row_settings(rows: Sequence[SequenceState | None], vocabulary: int) -> RowSettings:
    """Free slots are greedy and unfiltered, which costs nothing."""
    settings = RowSettings(
        seeds=np.zeros((len(rows), 2), np.uint32),
        sample_indices=np.zeros(len(rows), np.int32),
        temperatures=np.zeros(len(rows), np.float32),
        top_k=np.full(len(rows), vocabulary, np.int32),
        top_p=np.ones(len(rows), np.float32),
    )
    for at, row in enumerate(rows):
        if row is not None:
            settings.seeds[at] = row.seed >> 32, row.seed & 0xFFFFFFFF
            settings.sample_indices[at] = row.index
            settings.temperatures[at] = row.settings.temperature
            settings.top_k[at] = min(row.settings.top_k, vocabulary) if row.settings.top_k > 0 else vocabulary
            settings.top_p[at] = row.settings.top_p
    return settings


def stop_tokens_of(settings: SamplingSettings, config: ModelConfig) -> tuple[int, ...]:
    """Those that end a row. UserError for more of what ends one than the programs, or the host between them, can look for."""
    tokens = {*settings.stop_token_ids, *(config.eos_token_ids if settings.stop_at_eos else ())}
    if len(tokens) > MAX_STOP_TOKENS:
        raise UserError(f"{len(tokens)} stop tokens; at most {MAX_STOP_TOKENS} are supported")
    if len(settings.stop_strings) > MAX_STOP_STRINGS or any(
        len(stop) > MAX_STOP_LENGTH for stop in settings.stop_strings
    ):
        raise UserError(
            f"at most {MAX_STOP_STRINGS} stop strings of at most {MAX_STOP_LENGTH} characters are supported"
        )
    return tuple(sorted(tokens))
