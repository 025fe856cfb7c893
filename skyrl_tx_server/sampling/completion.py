"""Appends sampled tokens to sequences and turns complete sequences into results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.engine.executor_protocol import FailedSequence, FinishedSequence
from skyrl_tx_server.engine.operations import SampledSequence, SamplingSettings
from skyrl_tx_server.engine.stop_strings import load_tokenizer
from skyrl_tx_server.sampling.model_runner import ModelRunner
from skyrl_tx_server.sampling.preemption import SequencePool


class CompletionChecker:
    """Checks after each prefill and each decode dispatch which sequences are complete. The tokenizer is
    loaded when the first request with stop strings starts."""

    def __init__(self, pool: SequencePool, runner: ModelRunner, *, model_dir: Path) -> None:
        self._pool = pool
        self._runner = runner
        self._model_dir = model_dir
        self._tokenizer: Tokenizer | None = None

    def prepare(self, settings: SamplingSettings) -> None:
        """Load the tokenizer if these settings need it."""
        if settings.stop_strings and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_dir)

    def append(
        self, slot: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> FinishedSequence | FailedSequence | None:
        """Append sampled tokens to the sequence in `slot`. If the sequence is complete or fails, free the
        slot and return the result."""
        sequence = self._pool.slots[slot]
        assert sequence is not None and tokens
        try:
            end = sequence.extend(tokens, logprobs, self._tokenizer)
            if end is None:
                return None
            length, reason = end
            topk = self._runner.score_sequence(sequence, length) if sequence.topk else None
        except Exception as error:
            self._pool.fail(slot)
            return FailedSequence(request_id=sequence.request_id, error=error)
        self._pool.finish(slot)
        result = SampledSequence(
            tokens=np.array(sequence.tokens[:length], np.int32),
            logprobs=np.array(sequence.logprobs[:length], np.float32),
            stop_reason=reason,
            topk=topk,
        )
        return FinishedSequence(request_id=sequence.request_id, index=sequence.index, sequence=result)
