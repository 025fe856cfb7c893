"""A trajectory and its advantage -> tinker.Datum. Turns that extend one another become one datum; a rewritten history starts a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker

from src.core.token_ids import starts_with
from src.core.trajectory import Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSequence:
    """One stretch of context with what was sampled in it; every array has one entry per token."""

    tokens: np.ndarray  # [T] int64
    sampled: np.ndarray  # [T] bool
    logprobs: np.ndarray  # [T] float32, the sampler's; 0 where not sampled
    advantages: np.ndarray  # [T] float32; 0 where not sampled
    versions: np.ndarray  # [T] int64, the policy version that sampled the token; 0 where not sampled

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())


def merge_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Runs of turns in which each prompt begins with the run's previous prompt and completion.

    A run may be taken up again after others: a summary's side conversation does not break the main one.
    """
    runs: list[list[Turn]] = []
    for turn in turns:
        extended = next((run for run in reversed(runs) if extends(turn, run[-1])), None)
        if extended is None:
            runs.append([turn])
        else:
            extended.append(turn)
    return runs


def extends(turn: Turn, previous: Turn) -> bool:
    """Whether its prompt begins with the other's prompt and completion. The completion is looked at first: it is short, and where a history
    was rewritten it stands elsewhere, so that the long prompts are seldom compared in vain."""
    start = len(previous.prompt_ids)
    said = turn.prompt_ids[start : start + len(previous.completion_ids)]
    return said == previous.completion_ids and starts_with(turn.prompt_ids, previous.prompt_ids)


def sequences_of(turns: Sequence[Turn], *, advantage: float) -> list[TokenSequence]:
    """The trainable sequences of one trajectory; runs without a sampled token are left out."""
    sequences = (_sequence(run, advantage) for run in merge_turns(turns))
    return [sequence for sequence in sequences if sequence.num_sampled]


def step_sequences_of(turns: Sequence[Turn], *, advantage: float) -> list[TokenSequence]:
    """One sequence per turn, however the turns extend one another."""
    return [_sequence([turn], advantage) for turn in turns if turn.completion_ids]


def with_advantage(sequence: TokenSequence, advantage: float) -> TokenSequence:
    return replace(sequence, advantages=np.where(sequence.sampled, np.float32(advantage), np.float32(0.0)))


def scaled(sequence: TokenSequence, weight: float) -> TokenSequence:
    return replace(sequence, advantages=sequence.advantages * np.float32(weight))


def to_datum(sequence: TokenSequence) -> tinker.Datum:
    """Position t of the input predicts token t + 1, so targets and everything about them shift by one.

    tokens [p, a, b], a and b sampled: model_input [p, a], target_tokens [a, b], logprobs and advantages those of a and b.
    """
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(sequence.tokens[1:].astype(np.int64)),
            "logprobs": tinker.TensorData.from_numpy(sequence.logprobs[1:].astype(np.float32)),
            "advantages": tinker.TensorData.from_numpy(sequence.advantages[1:].astype(np.float32)),
        },
    )


def to_datums(sequences: Iterable[TokenSequence]) -> list[tinker.Datum]:
    """Sequences whose advantages are all zero have no gradient and are not sent."""
    return [to_datum(sequence) for sequence in sequences if has_gradient(sequence)]


def has_gradient(sequence: TokenSequence) -> bool:
    return bool(sequence.advantages.any())


def _sequence(run: Sequence[Turn], advantage: float) -> TokenSequence:
    """The last turn's prompt and completion hold every other's."""
    tokens = np.array([*run[-1].prompt_ids, *run[-1].completion_ids], dtype=np.int64)
    sampled, logprobs, versions = (
        np.zeros(len(tokens), dtype=bool),
        np.zeros(len(tokens), dtype=np.float32),
        np.zeros_like(tokens),
    )
    for turn in run:
        start = len(turn.prompt_ids)
        said = slice(start, start + len(turn.completion_ids))
        sampled[said], logprobs[said], versions[said] = True, turn.logprobs, turn.policy_version
    advantages = np.where(sampled, np.float32(advantage), np.float32(0.0))
    return TokenSequence(
        tokens=tokens, sampled=sampled, logprobs=logprobs, advantages=advantages, versions=versions
    )
