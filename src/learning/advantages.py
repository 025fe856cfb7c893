"""Advantage estimators, and the token weights that express the loss reduction.

The estimators are SkyRL's, for one reward per trajectory. `gae` is missing because the Tinker API has no
critic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from src.core.errors import ConfigError

Estimator = Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce++"]

# The two values are SkyRL's. EPSILON is added to divisors. The rewards of a group count as equal if they
# differ by at most EPSILON.
EPSILON = 1e-6
WHITENING_EPSILON = 1e-8  # added to the variance


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageEstimator:
    """The formula that turns the rewards of a group into advantages."""

    formula: str  # the advantage of a reward r, for help texts
    source: str
    scale: Callable[[Sequence[float]], float] | None  # the factor of r - mean; None: the advantage is r
    # The advantage of the only member of a group, with singleton_advantage=raw.
    raw_singleton: Callable[[float], float] = lambda reward: 0.0
    is_whitened: bool = False  # whether `whiten` is applied to the advantages of the batch
    allows_negative_rewards: bool = True
    options: tuple[str, ...] = ()  # options of the trainer that change the advantages


# docs/how-to/add-an-advantage-estimator.md describes how to add an estimator. The help of the option
# `advantage_estimator` and docs/advantages.md are generated from this table.
ADVANTAGE_ESTIMATORS: dict[Estimator, AdvantageEstimator] = {
    "grpo": AdvantageEstimator(
        formula="(r - mean) / std of the group",
        source="GRPO, arXiv 2402.03300; the sample standard deviation plus 1e-6, as in SkyRL",
        scale=lambda rewards: 1 / (statistics.stdev(rewards) + EPSILON),
        raw_singleton=lambda reward: reward / (1 + EPSILON),
        options=("normalize_advantages_by_std", "singleton_advantage"),
    ),
    "dr_grpo": AdvantageEstimator(
        formula="r - mean",
        source="Dr. GRPO, arXiv 2503.20783",
        scale=lambda rewards: 1.0,
        raw_singleton=lambda reward: reward,
        options=("singleton_advantage",),
    ),
    "rloo": AdvantageEstimator(
        formula="r - mean of the group's other rewards",
        source="RLOO, arXiv 2402.14740",
        scale=lambda rewards: len(rewards) / (len(rewards) - 1),
    ),
    "maxrl": AdvantageEstimator(
        formula="(r - mean) / mean, for rewards of at least 0",
        source="MaxRL as in SkyRL, with 1e-6 added to the mean",
        scale=lambda rewards: 1 / (statistics.fmean(rewards) + EPSILON),
        allows_negative_rewards=False,  # a negative mean would reverse the sign of the advantages
    ),
    "reinforce++": AdvantageEstimator(
        formula="the reward, whitened over the sampled tokens of the batch",
        source="REINFORCE++, arXiv 2501.03262",
        scale=None,
        is_whitened=True,
    ),
}


def describe_estimators() -> str:
    """Return the help text of the option `advantage_estimator`."""
    return "; ".join(f"{name}: {estimator.formula}" for name, estimator in ADVANTAGE_ESTIMATORS.items())


def group_advantages(rewards_G: Sequence[float], *, estimator: Estimator, singleton: str) -> list[float]:
    """Return one advantage per member of a group, before `whiten`.

    An estimator without a `scale` returns the rewards. With a `scale`, the advantages are those of SkyRL:

    - rewards that differ: `(reward - mean) * scale`
    - two or more equal rewards: zeros
    - a single reward: zero with `singleton="zero"`, the value of `raw_singleton` with `singleton="raw"`

    Raises ConfigError for a negative reward if the estimator does not allow negative rewards, and for a
    `scale` that gives an advantage that is not finite.

    >>> group_advantages([1, 0], estimator="dr_grpo", singleton="zero")
    [0.5, -0.5]
    """
    rewards = [float(reward) for reward in rewards_G]
    chosen = ADVANTAGE_ESTIMATORS[estimator]
    if not chosen.allows_negative_rewards and min(rewards) < 0:
        raise ConfigError(
            f"advantage_estimator={estimator} needs rewards of at least 0, but a trial has the reward "
            f"{min(rewards):g}; use another estimator"
        )
    if chosen.scale is None:
        return rewards
    if len(rewards) == 1:
        return [chosen.raw_singleton(rewards[0]) if singleton == "raw" else 0.0]
    if max(rewards) - min(rewards) <= EPSILON:
        return [0.0] * len(rewards)
    mean, scale = statistics.fmean(rewards), chosen.scale(rewards)
    advantages = [(reward - mean) * scale for reward in rewards]
    if not all(map(math.isfinite, advantages)):
        raise ConfigError(
            f"advantage_estimator={estimator} gives the factor {scale:g} for the rewards "
            f"{', '.join(f'{reward:g}' for reward in rewards)}; correct its `scale` in {__name__}"
        )
    return advantages


def whiten(returns_S: Sequence[float], num_tokens_S: Sequence[int]) -> list[float]:
    """Center the returns of a batch and divide them by their standard deviation (REINFORCE++).

    The arguments have the return and the number of trained tokens of each of the S examples of the batch.
    Each return counts once per trained token, since with one final reward and no discount all tokens of a
    sequence have the same return. Fewer than two tokens give zeros.

    >>> [round(value, 4) for value in whiten([1, 0], [3, 3])]
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
    """Return, for each sequence of an optimizer step, the weight of each of its trained tokens.

    Here a sequence is one example: all tokens of a trajectory, or of one turn with `step_wise_trajectories`.
    `num_tokens_S` has the number of trained tokens of each sequence. A masked sequence has 0 trained tokens
    and still counts as one of the S sequences. `prompts_S` names the prompt of each sequence. Only
    `prompt_mean` uses the prompts: it computes the mean over the trained tokens of all sequences with the
    same prompt, and then the mean over the prompts.

    >>> token_weights([2, 6], prompts_S=["a", "a"], reduction="token_mean", max_sequence_length=10)
    [0.125, 0.125]
    >>> token_weights([2, 6], prompts_S=["a", "b"], reduction="sequence_mean", max_sequence_length=10)
    [0.25, 0.08333333333333333]
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
