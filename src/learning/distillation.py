"""On-policy distillation: a teacher scores the tokens that the policy sampled.

The term `teacher_coef * (teacher logprob - sampler logprob)` is added to the advantage of each sampled token.
The mean of `teacher logprob - sampler logprob` estimates the negative reverse KL divergence. As in
tinker-cookbook, no mean is subtracted from the term. If the teacher gives every token of a batch a lower
logprob than the sampler, the term therefore decreases the probability of every token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from src.learning.examples import Example
from src.learning.kl_penalty import KlResult, difference
from src.learning.penalty_options import DistillationOptions
from src.policy.sampling_policy import ReferenceModel


async def apply_teacher(
    examples: Sequence[Example], teacher: ReferenceModel, options: DistillationOptions
) -> KlResult:
    """Return the examples with new advantages. The advantage of each sampled token becomes
    `reward_coef * advantage + teacher_coef * (teacher logprob - sampler logprob)`.

    `KlResult.mean_kl` is the mean of `sampler logprob - teacher logprob` over the sampled tokens, in nats.
    """
    sequences = [sequence for example in examples for sequence in example.sequences]
    scores = await asyncio.gather(*(teacher.logprobs(sequence.tokens.tolist()) for sequence in sequences))
    differences = [
        difference(sequence, logprobs) for sequence, logprobs in zip(sequences, scores, strict=True)
    ]
    changed = iter(
        replace(
            sequence,
            advantages=(options.reward_coef * sequence.advantages - options.teacher_coef * values).astype(
                np.float32
            ),
        )
        for sequence, values in zip(sequences, differences, strict=True)
    )
    num_tokens = max(1, sum(sequence.num_sampled for sequence in sequences))
    return KlResult(
        examples=[
            replace(example, sequences=[next(changed) for _ in example.sequences]) for example in examples
        ],
        mean_kl=sum(float(values.sum()) for values in differences) / num_tokens,
    )
