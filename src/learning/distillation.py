"""On-policy distillation: a teacher scores the tokens that the policy sampled.

The term `teacher_coef * (teacher logprob - sampler logprob)` is added to the advantage of each sampled token.
The mean of `teacher logprob - sampler logprob` estimates the negative reverse KL divergence. As in
tinker-cookbook, no mean is subtracted from the term. If the teacher gives every token of a batch a lower
logprob than the sampler, the term therefore decreases the probability of every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from src.learning.examples import Example, all_sequences, with_advantages
from src.learning.kl_penalty import KlResult, differences_from, mean_of_sampled
from src.learning.penalty_options import DistillationOptions
from src.policy.sampling_policy import ReferenceModel


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
