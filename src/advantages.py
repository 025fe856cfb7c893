"""Group-relative advantages, and the per-token weight that turns Tinker's plain sum into the mean asked for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

EPSILON = 1e-6  # SkyRL's: beside the standard deviation, and below which rewards count as equal


def group_advantages(rewards_G: Sequence[float], *, normalize_by_std: bool, singleton: str) -> list[float]:
    """GRPO within one group: `(r - mean) / (std + 1e-6)` with the sample deviation, or `r - mean`.

    A group's only member has nothing to be compared with: `singleton="zero"` says so, `"raw"` is SkyRL's `r / (1 + 1e-6)`, or `r`.

    >>> group_advantages([1, 0], normalize_by_std=False, singleton="zero")
    [0.5, -0.5]
    """
    if len(rewards_G) == 1:
        if singleton == "zero":
            return [0.0]
        return [rewards_G[0] / (1 + EPSILON) if normalize_by_std else float(rewards_G[0])]
    if max(rewards_G) - min(rewards_G) <= EPSILON:  # equal but for rounding
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(rewards_G)
    scale = statistics.stdev(rewards_G) + EPSILON if normalize_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards_G]


def token_weights(num_tokens_S: Sequence[int], *, reduction: str, max_sequence_length: int) -> list[float]:
    """For each sequence of one optimizer step, the weight of each of its trained tokens.

    `num_tokens_S` counts trained tokens; a fully masked sequence counts 0 and still is one of the `S` sequences.

    >>> token_weights([2, 6], reduction="token_mean", max_sequence_length=10)
    [0.125, 0.125]
    >>> token_weights([2, 6], reduction="seq_mean_token_sum_norm", max_sequence_length=10)
    [0.05, 0.05]
    """
    match reduction:
        case "token_mean":
            return [1 / max(1, sum(num_tokens_S))] * len(num_tokens_S)
        case "sequence_mean":
            return [1 / (len(num_tokens_S) * max(1, num_tokens)) for num_tokens in num_tokens_S]
        case "seq_mean_token_sum_norm":
            return [1 / (max(1, len(num_tokens_S)) * max_sequence_length)] * len(num_tokens_S)
        case _:
            raise AssertionError(f"unknown loss reduction {reduction}")
