"""KL penalty towards a reference model.

The penalty is part of the advantages because the server's losses have no KL term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from src.learning.datums import TokenSequence
from src.learning.examples import Example
from src.learning.penalty_options import KlOptions
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
    sequences = [sequence for example in examples for sequence in example.sequences]
    scores = await asyncio.gather(*(reference.logprobs(sequence.tokens.tolist()) for sequence in sequences))
    differences = [
        difference(sequence, logprobs) for sequence, logprobs in zip(sequences, scores, strict=True)
    ]
    penalties = [kl_estimates(values, estimator=options.kl_estimator) for values in differences]
    num_tokens = max(1, sum(sequence.num_sampled for sequence in sequences))
    mean = sum(float(values.sum()) for values in penalties) / num_tokens
    coefficient = options.kl_penalty_coef
    changed = iter(
        replace(
            sequence,
            advantages=sequence.advantages
            + np.where(sequence.sampled, coefficient * (mean - values), 0).astype(np.float32),
        )
        for sequence, values in zip(sequences, penalties, strict=True)
    )
    return KlResult(
        examples=[
            replace(example, sequences=[next(changed) for _ in example.sequences]) for example in examples
        ],
        mean_kl=sum(float(values.sum()) for values in differences) / num_tokens,
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


def difference(sequence: TokenSequence, reference_logprobs: Sequence[float]) -> np.ndarray:
    """Return sampler minus reference logprobs, [T] float32, and 0 for tokens that were not sampled.

    `reference_logprobs` starts at the second token.
    """
    reference = np.concatenate([[0.0], reference_logprobs]).astype(np.float32)
    return np.where(sequence.sampled, sequence.logprobs - reference, np.float32(0.0))
