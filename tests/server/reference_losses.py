"""Reference implementations of the losses in float64 numpy.

The formulas are those in the docstring of `skyrl_tx_server/training/losses.py`. Each function in `REFERENCES`
returns the loss of every token of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from skyrl_tx_server.engine.loss_spec import LossFn, LossSettings
from skyrl_tx_server.model.lora.lora_math import ArrayLike


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Float64 arrays of one sequence, and the options of the request."""

    logprobs: np.ndarray
    stop_gradient_logprobs: np.ndarray  # in place of `logprobs` where the formula has a stop-gradient
    weights: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    sequence_ratio_mask: np.ndarray
    low: float
    high: float
    beta: float


def token_ratio(terms: Terms) -> np.ndarray:
    return np.exp(terms.logprobs - terms.sampler_logprobs)


def clipped(terms: Terms, ratio: np.ndarray) -> np.ndarray:
    """Return the clipped loss of ppo and gspo for the ratio of each token."""
    clipped_product = np.clip(ratio, terms.low, terms.high) * terms.advantages
    return -np.minimum(ratio * terms.advantages, clipped_product)


def cispo(terms: Terms) -> np.ndarray:
    ratio = np.exp(terms.stop_gradient_logprobs - terms.sampler_logprobs)
    return -np.clip(ratio, terms.low, terms.high) * terms.logprobs * terms.advantages


def dro(terms: Terms) -> np.ndarray:
    log_ratio = terms.logprobs - terms.sampler_logprobs
    return -(terms.logprobs * terms.advantages - 0.5 * terms.beta * log_ratio**2)


def gspo(terms: Terms) -> np.ndarray:
    log_ratio = sequence_log_ratio(
        terms.stop_gradient_logprobs, terms.sampler_logprobs, terms.sequence_ratio_mask
    )
    return clipped(terms, np.exp(log_ratio + terms.logprobs - terms.stop_gradient_logprobs))


REFERENCES: dict[LossFn, Callable[[Terms], np.ndarray]] = {
    LossFn.CROSS_ENTROPY: lambda terms: -terms.weights * terms.logprobs,
    LossFn.IMPORTANCE_SAMPLING: lambda terms: -token_ratio(terms) * terms.advantages,
    LossFn.PPO: lambda terms: clipped(terms, token_ratio(terms)),
    LossFn.CISPO: cispo,
    LossFn.DRO: dro,
    LossFn.GSPO: gspo,
}


def total(
    loss_fn: LossFn,
    logprobs: np.ndarray,
    *,
    weights: ArrayLike | None = None,
    sampler_logprobs: ArrayLike | None = None,
    advantages: ArrayLike | None = None,
    sequence_ratio_mask: np.ndarray | None = None,
    stop_gradient_logprobs: np.ndarray | None = None,
    options: dict[str, float] | None = None,
) -> float:
    """Return the loss of one sequence, summed over its tokens.

    A missing array consists of zeros, except `stop_gradient_logprobs`, whose default is `logprobs`. Missing
    `weights` are zeros too, although the server's default is 1. Missing options have the default values of
    the server. To compute a derivative by finite differences, change `logprobs` and pass the unchanged
    logprobs as `stop_gradient_logprobs`.
    """

    def to_float64(array: ArrayLike | None) -> np.ndarray:
        return np.zeros(len(logprobs)) if array is None else np.asarray(array, np.float64)

    settings = {**asdict(LossSettings()), **(options or {})}
    terms = Terms(
        logprobs=to_float64(logprobs),
        stop_gradient_logprobs=to_float64(
            logprobs if stop_gradient_logprobs is None else stop_gradient_logprobs
        ),
        weights=to_float64(weights),
        sampler_logprobs=to_float64(sampler_logprobs),
        advantages=to_float64(advantages),
        sequence_ratio_mask=to_float64(sequence_ratio_mask),
        low=settings["clip_low_threshold"],
        high=settings["clip_high_threshold"],
        beta=settings["beta"],
    )
    return float(np.sum(REFERENCES[loss_fn](terms)))


def sequence_log_ratio(logprobs: np.ndarray, sampler_logprobs: ArrayLike, mask: np.ndarray) -> float:
    """Return the mean log-ratio of a sequence over the tokens that `mask` selects."""
    difference = np.asarray(logprobs, np.float64) - np.asarray(sampler_logprobs, np.float64)
    return float(np.mean(difference[np.asarray(mask) != 0]))
