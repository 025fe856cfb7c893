"""Tinker's losses written a second time, in float64 numpy and straight from the contract's table, to test the server's against."""

from __future__ import annotations

import numpy as np


def total(
    loss_fn: str,
    logprobs: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    sampler_logprobs: np.ndarray | None = None,
    advantages: np.ndarray | None = None,
    sequence_ratio_mask: np.ndarray | None = None,
    low: float = 0.8,
    high: float = 1.2,
    beta: float = 0.05,
    frozen_logprobs: np.ndarray | None = None,
) -> float:
    """The summed loss; for gspo the arrays are those of one sequence.

    `frozen_logprobs` are those under a stop-gradient (cispo's ratio, gspo's sequence ratio); by default `logprobs` themselves.
    """
    lp = np.asarray(logprobs, np.float64)
    if loss_fn == "cross_entropy":
        return float(-np.sum(np.asarray(weights, np.float64) * lp))
    q, advantage = np.asarray(sampler_logprobs, np.float64), np.asarray(advantages, np.float64)
    ratio = np.exp(lp - q)
    if loss_fn == "importance_sampling":
        return float(-np.sum(ratio * advantage))
    if loss_fn == "ppo":
        return float(-np.sum(np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)))
    if loss_fn == "cispo":
        frozen = lp if frozen_logprobs is None else np.asarray(frozen_logprobs, np.float64)
        return float(-np.sum(np.clip(np.exp(frozen - q), low, high) * lp * advantage))
    if loss_fn == "dro":
        return float(-np.sum(lp * advantage - 0.5 * beta * (lp - q) ** 2))
    if loss_fn == "gspo":
        frozen = lp if frozen_logprobs is None else np.asarray(frozen_logprobs, np.float64)
        sequence_ratio = np.exp(sequence_log_ratio(frozen, q, sequence_ratio_mask) + lp - frozen)
        return float(
            -np.sum(np.minimum(sequence_ratio * advantage, np.clip(sequence_ratio, low, high) * advantage))
        )
    raise ValueError(loss_fn)


def sequence_log_ratio(logprobs: np.ndarray, sampler_logprobs: np.ndarray, mask: np.ndarray | None) -> float:
    """gspo's s: the mean log-ratio of a sequence over the tokens its mask counts."""
    assert mask is not None
    return float(
        np.mean(
            (np.asarray(logprobs, np.float64) - np.asarray(sampler_logprobs, np.float64))[
                np.asarray(mask) != 0
            ]
        )
    )
