"""KL penalty towards a reference policy, inside the advantages, since the server's losses have no term for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from src.datums import TokenSequence
from src.examples import Example
from src.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalised:
    """The examples with the penalty in their advantages, and the estimated KL divergence per token."""

    examples: list[Example]
    mean_kl: float


async def penalised(examples: Sequence[Example], reference: Policy, *, coefficient: float) -> Penalised:
    """Each sampled token's advantage plus `coefficient * (mean difference - its difference)`.

    A token's difference is its sampled logprob minus the reference's; the mean over all sampled tokens is the k1 estimate of the KL
    divergence, and subtracting from it leaves the batch's sum of advantages unchanged.
    """
    sequences = [sequence for example in examples for sequence in example.sequences]
    scores = await asyncio.gather(*(reference.logprobs(sequence.tokens.tolist()) for sequence in sequences))
    differences = [difference(sequence, logprobs) for sequence, logprobs in zip(sequences, scores, strict=True)]
    num_tokens = sum(sequence.num_sampled for sequence in sequences)
    mean = float(sum(values.sum() for values in differences)) / max(1, num_tokens)
    changed = iter(
        replace(sequence, advantages=sequence.advantages + np.where(sequence.sampled, coefficient * (mean - values), 0).astype(np.float32))
        for sequence, values in zip(sequences, differences, strict=True)
    )
    return Penalised(
        examples=[replace(example, sequences=[next(changed) for _ in example.sequences]) for example in examples],
        mean_kl=mean,
    )


def difference(sequence: TokenSequence, reference_logprobs: Sequence[float]) -> np.ndarray:
    """[T] float32: sampled minus reference logprob, 0 where not sampled. `reference_logprobs` starts at the second token."""
    reference = np.concatenate([[0.0], reference_logprobs]).astype(np.float32)
    return np.where(sequence.sampled, sequence.logprobs - reference, np.float32(0.0))
