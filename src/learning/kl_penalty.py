"""KL penalty towards a reference model, and on-policy distillation from a teacher.

Both change the advantages, because the server's losses have no such terms.

Distillation adds `teacher_coef * (teacher logprob - sampler logprob)` to the advantage of each sampled token.
The mean of `teacher logprob - sampler logprob` estimates the negative reverse KL divergence. As in
tinker-cookbook, no mean is subtracted from the term. If the teacher gives every token of a batch a lower
logprob than the sampler, the term therefore decreases the probability of every token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from src.learning.datums import TokenSequence
from src.learning.examples import Example, all_sequences, with_advantages
from src.learning.penalty_options import DistillationOptions, KlOptions
from src.policy.sampling_policy import ReferenceModel


@dataclass(frozen=True, kw_only=True, slots=True)
class KlResult:
    """The examples with changed advantages, and the KL divergence per sampled token as k1 estimates it."""

    examples: list[Example]
    mean_kl: float


async def apply_kl_penalty(
    examples: Sequence[Example], reference: ReferenceModel, options: KlOptions
) -> KlResult:
    """Add `kl_penalty_coef * (mean penalty - penalty)` to the advantage of each sampled token.

    The penalty of a token is the estimate of `kl_estimates`. The mean is over all sampled tokens of
    `examples`, so the sum of the advantages of these tokens does not change.
    """
    sequences = all_sequences(examples)
    differences = await differences_from(reference, sequences)
    penalties = [kl_estimates(values, estimator=options.kl_estimator) for values in differences]
    mean, coefficient = mean_of_sampled(penalties, sequences), options.kl_penalty_coef
    advantages = [
        sequence.advantages + np.where(sequence.sampled, coefficient * (mean - values), 0).astype(np.float32)
        for sequence, values in zip(sequences, penalties, strict=True)
    ]
    return KlResult(
        examples=with_advantages(examples, advantages), mean_kl=mean_of_sampled(differences, sequences)
    )


async def apply_teacher(
    examples: Sequence[Example], teacher: ReferenceModel, options: DistillationOptions
) -> KlResult:
    """Return the examples with new advantages. The advantage of each sampled token becomes
    `reward_coef * advantage + teacher_coef * (teacher logprob - sampler logprob)`.

    `KlResult.mean_kl` is the mean of `sampler logprob - teacher logprob` over the sampled tokens, in nats.
    """
    sequences = all_sequences(examples)
    differences = await differences_from(teacher, sequences)
    advantages = [
        (options.reward_coef * sequence.advantages - options.teacher_coef * values).astype(np.float32)
        for sequence, values in zip(sequences, differences, strict=True)
    ]
    return KlResult(
        examples=with_advantages(examples, advantages), mean_kl=mean_of_sampled(differences, sequences)
    )


def kl_estimates(differences: np.ndarray, *, estimator: str) -> np.ndarray:
    """Return Schulman's estimate of the KL divergence at each token. `differences` is logp - logp_reference.

    Source: http://joschu.net/blog/kl-approx.html

    >>> [round(float(kl_estimates(np.array(0.5), estimator=name)), 7) for name in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.1065307]
    """
    match estimator:
        case "k1":
            return differences
        case "k2":
            return differences**2 / 2
        case "k3":
            return np.exp(-differences) - 1 + differences
        case _:
            raise AssertionError(f"unknown KL estimator {estimator}")


async def differences_from(model: ReferenceModel, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Return the sampler's logprobs minus those of `model`, [T] float32 for each sequence, and 0 for tokens
    that were not sampled."""
    scores = await asyncio.gather(*(model.logprobs(sequence.tokens.tolist()) for sequence in sequences))
    references = (np.concatenate([[0.0], logprobs]).astype(np.float32) for logprobs in scores)
    return [
        np.where(sequence.sampled, sequence.logprobs - reference, np.float32(0.0))
        for sequence, reference in zip(sequences, references, strict=True)
    ]


def mean_of_sampled(values_D: Sequence[np.ndarray], sequences: Sequence[TokenSequence]) -> float:
    """Return the mean over the sampled tokens of all sequences. The values of other tokens must be 0."""
    num_tokens = max(1, sum(sequence.num_sampled for sequence in sequences))
    return sum(float(values.sum()) for values in values_D) / num_tokens
