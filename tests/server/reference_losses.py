"""Reference implementations of the losses in float64 numpy, from the table in docs/server-contract.md.

Each function takes one sequence. `lp` are its logprobs, `frozen` the same logprobs under a stop-gradient.
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

    lp: np.ndarray
    frozen: np.ndarray
    weights: np.ndarray
    q: np.ndarray  # the sampler's logprobs
    advantages: np.ndarray
    mask: np.ndarray  # sequence_ratio_mask
    low: float
    high: float
    beta: float


def clipped(terms: Terms, ratio: np.ndarray) -> np.ndarray:
    product = np.clip(ratio, terms.low, terms.high) * terms.advantages
    return -np.minimum(ratio * terms.advantages, product)


def cispo(terms: Terms) -> np.ndarray:
    return -np.clip(np.exp(terms.frozen - terms.q), terms.low, terms.high) * terms.lp * terms.advantages


def dro(terms: Terms) -> np.ndarray:
    return -(terms.lp * terms.advantages - 0.5 * terms.beta * (terms.lp - terms.q) ** 2)


def gspo(terms: Terms) -> np.ndarray:
    log_ratio = sequence_log_ratio(terms.frozen, terms.q, terms.mask)
    return clipped(terms, np.exp(log_ratio + terms.lp - terms.frozen))


REFERENCES: dict[LossFn, Callable[[Terms], np.ndarray]] = {
    LossFn.CROSS_ENTROPY: lambda terms: -terms.weights * terms.lp,
    LossFn.IMPORTANCE_SAMPLING: lambda terms: -np.exp(terms.lp - terms.q) * terms.advantages,
    LossFn.PPO: lambda terms: clipped(terms, np.exp(terms.lp - terms.q)),
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
    frozen_logprobs: np.ndarray | None = None,
    options: dict[str, float] | None = None,
) -> float:
    """Return the summed loss of one sequence.

    The default of `frozen_logprobs` is `logprobs`. Missing options have the default values of the server.
    """

    def to_float64(array: ArrayLike | None) -> np.ndarray:
        return np.zeros(len(logprobs)) if array is None else np.asarray(array, np.float64)

    settings = {**asdict(LossSettings()), **(options or {})}
    terms = Terms(
        lp=to_float64(logprobs),
        frozen=to_float64(logprobs if frozen_logprobs is None else frozen_logprobs),
        weights=to_float64(weights),
        q=to_float64(sampler_logprobs),
        advantages=to_float64(advantages),
        mask=to_float64(sequence_ratio_mask),
        low=settings["clip_low_threshold"],
        high=settings["clip_high_threshold"],
        beta=settings["beta"],
    )
    return float(np.sum(REFERENCES[loss_fn](terms)))


def sequence_log_ratio(logprobs: np.ndarray, sampler_logprobs: ArrayLike, mask: np.ndarray) -> float:
    """Return the mean log-ratio of a sequence over the tokens that `mask` selects."""
    difference = np.asarray(logprobs, np.float64) - np.asarray(sampler_logprobs, np.float64)
    return float(np.mean(difference[np.asarray(mask) != 0]))
