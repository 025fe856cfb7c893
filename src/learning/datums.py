"""Conversion of trajectories to tinker.Datum. The turns of a chain become one datum (`merge_turns`).

If the agent rewrites the history of a conversation, the next turn starts a new chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker

from src.core.token_ids import starts_with
from src.core.trajectory import Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSequence:
    """A token sequence with the sampled tokens marked. Every array has one entry per token."""

    tokens: np.ndarray  # [T] int64
    sampled: np.ndarray  # [T] bool
    logprobs: np.ndarray  # [T] float32, the sampler's logprobs; 0 for tokens that were not sampled
    advantages: np.ndarray  # [T] float32; 0 for tokens that were not sampled
    versions: np.ndarray  # [T] int64, the policy version that sampled each token; 0 if it was not sampled

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())


def merge_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Divide turns into chains in which each prompt starts with the previous prompt and completion.

    A chain can continue after turns of other chains, so a side conversation that writes a summary does not
    interrupt the main conversation.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        continued_chain = next((chain for chain in reversed(chains) if extends(turn, chain[-1])), None)
        if continued_chain is None:
            chains.append([turn])
        else:
            continued_chain.append(turn)
    return chains


def extends(turn: Turn, previous: Turn) -> bool:
    """Return whether the prompt of `turn` starts with the prompt and completion of `previous`.

    The completion is compared first, because it is short and differs in most rewritten histories. The long
    prompts are compared only if the completion is equal. The first token of the completion is compared before
    its other tokens, so most comparisons read one token. This matters because a turn with a rewritten history
    is compared with the last turn of every chain (`merge_turns`).
    """
    start, completion = len(previous.prompt_ids), previous.completion_ids
    if completion and (start >= len(turn.prompt_ids) or turn.prompt_ids[start] != completion[0]):
        return False
    continuation = turn.prompt_ids[start : start + len(completion)]
    return continuation == completion and starts_with(turn.prompt_ids, previous.prompt_ids)


def sequences_of(turns: Sequence[Turn], *, advantage: float) -> list[TokenSequence]:
    """Divide the turns of a trajectory into chains. Return a sequence for each chain with sampled tokens."""
    sequences = (_sequence(chain, advantage) for chain in merge_turns(turns))
    return [sequence for sequence in sequences if sequence.num_sampled]


def step_sequences_of(turns: Sequence[Turn], *, advantage: float) -> list[TokenSequence]:
    """Return one sequence for each turn that has sampled tokens. Turns are not merged into chains."""
    return [_sequence([turn], advantage) for turn in turns if turn.completion_ids]


def with_advantage(sequence: TokenSequence, advantage: float) -> TokenSequence:
    return replace(sequence, advantages=np.where(sequence.sampled, np.float32(advantage), np.float32(0.0)))


def scale_advantages(sequence: TokenSequence, weight: float) -> TokenSequence:
    return replace(sequence, advantages=sequence.advantages * np.float32(weight))


def to_datum(sequence: TokenSequence) -> tinker.Datum:
    """Convert a sequence. Position t of the input predicts token t + 1, so targets are shifted by one.

    Tokens [p, a, b] with a and b sampled give model_input [p, a] and target_tokens [a, b], with the logprobs
    and advantages of a and b.
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
    """Convert the sequences that have a nonzero advantage. All other sequences have no gradient."""
    return [to_datum(sequence) for sequence in sequences if has_gradient(sequence)]


def has_gradient(sequence: TokenSequence) -> bool:
    return bool(sequence.advantages.any())


def _sequence(chain: Sequence[Turn], advantage: float) -> TokenSequence:
    """Build the sequence of a chain. The last prompt and completion contain the tokens of all turns."""
    tokens = np.array([*chain[-1].prompt_ids, *chain[-1].completion_ids], dtype=np.int64)
    sampled = np.zeros(len(tokens), dtype=bool)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    versions = np.zeros_like(tokens)
    for turn in chain:
        start = len(turn.prompt_ids)
        span = slice(start, start + len(turn.completion_ids))
        sampled[span], logprobs[span], versions[span] = True, turn.logprobs, turn.policy_version
    advantages = np.where(sampled, np.float32(advantage), np.float32(0.0))
    return TokenSequence(
        tokens=tokens, sampled=sampled, logprobs=logprobs, advantages=advantages, versions=versions
    )
