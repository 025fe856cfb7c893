"""Advantages within a group or a batch, and the per-token weight that turns Tinker's plain sum into the mean asked for.

The estimators are SkyRL's, for one reward per trajectory; `gae` needs a critic, which the Tinker API has no place for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

Estimator = Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce++"]

EPSILON = 1e-6  # SkyRL's: beside the divisors, and below which rewards count as equal
WHITENING_EPSILON = 1e-8  # SkyRL's, beside the variance


def group_advantages(rewards_G: Sequence[float], *, estimator: Estimator, singleton: str) -> list[float]:
    """One advantage per member of a group, compared with the others.

    - `grpo`: `(r - mean) / (std + 1e-6)` with the sample deviation; `dr_grpo`: `r - mean` (arXiv 2503.20783)
    - `rloo`: `r` minus the mean of the others; `maxrl`: `(r - mean) / (mean + 1e-6)`
    - `reinforce++`: `r` itself; its baseline is the batch's, see `whiten`

    A group's only member has nothing to be compared with: `singleton="zero"` says so, `"raw"` gives what SkyRL gives: `r / (1 + 1e-6)` for
    grpo, `r` for dr_grpo; rloo and maxrl have no raw form and stay zero.

    >>> group_advantages([1, 0], estimator="dr_grpo", singleton="zero")
    [0.5, -0.5]
    """
    rewards = [float(reward) for reward in rewards_G]
    if estimator == "reinforce++":
        return rewards
    if len(rewards) == 1:
        raw = {"grpo": rewards[0] / (1 + EPSILON), "dr_grpo": rewards[0]}
        return [raw.get(estimator, 0.0) if singleton == "raw" else 0.0]
    if max(rewards) - min(rewards) <= EPSILON:  # equal but for rounding
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = {
        "grpo": 1 / (statistics.stdev(rewards) + EPSILON),
        "dr_grpo": 1.0,
        "rloo": len(rewards) / (len(rewards) - 1),
        "maxrl": 1 / (mean + EPSILON),
    }[estimator]
    return [(reward - mean) * scale for reward in rewards]


def whiten(returns_S: Sequence[float], num_tokens_S: Sequence[int]) -> list[float]:
    """REINFORCE++ over a batch of sequences: returns centred and divided by their deviation, each counted once per trained token.

    With one reward at the end and no discount, every token of a sequence has the same return. Fewer than two tokens are no sample: zeros.

    >>> [round(value, 4) for value in whitened([1, 0], [3, 3])]
    [0.9129, -0.9129]
    """
    num_tokens = sum(num_tokens_S)
    if num_tokens < 2:
        return [0.0] * len(returns_S)
    mean = math.sumprod(returns_S, num_tokens_S) / num_tokens
    variance = math.sumprod([(value - mean) ** 2 for value in returns_S], num_tokens_S) / (num_tokens - 1)
    return [(value - mean) / math.sqrt(variance + WHITENING_EPSILON) for value in returns_S]


def token_weights(
    num_tokens_S: Sequence[int], *, prompts_S: Sequence[str], reduction: str, max_sequence_length: int
) -> list[float]:
    """For each sequence of one optimizer step, the weight of each of its trained tokens.

    `num_tokens_S` counts trained tokens; a fully masked sequence counts 0 and still is one of the `S` sequences. `prompts_S` names the
    prompt of each, for `prompt_mean`: the token mean of each prompt, averaged over prompts.

    >>> token_weights([2, 6], prompts_S=["a", "a"], reduction="token_mean", max_sequence_length=10)
    [0.125, 0.125]
    >>> token_weights([2, 6], prompts_S=["a", "b"], reduction="seq_mean_token_sum_norm", max_sequence_length=10)
    [0.05, 0.05]
    >>> token_weights([1, 1, 4], prompts_S=["a", "a", "b"], reduction="prompt_mean", max_sequence_length=10)
    [0.25, 0.25, 0.125]
    """
    match reduction:
        case "token_mean":
            return [1 / max(1, sum(num_tokens_S))] * len(num_tokens_S)
        case "sequence_mean":
            return [1 / (len(num_tokens_S) * max(1, num_tokens)) for num_tokens in num_tokens_S]
        case "seq_mean_token_sum_norm":
            return [1 / (max(1, len(num_tokens_S)) * max_sequence_length)] * len(num_tokens_S)
        case "prompt_mean":
            totals = dict.fromkeys(prompts_S, 0)
            for prompt, num_tokens in zip(prompts_S, num_tokens_S, strict=True):
                totals[prompt] += num_tokens
            return [1 / (len(totals) * max(1, totals[prompt])) for prompt in prompts_S]
        case _:
            raise AssertionError(f"unknown loss reduction {reduction}")
