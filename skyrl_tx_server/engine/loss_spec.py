"""The table of losses. It contains the options of each loss and the inputs that the loss reads from a datum.

This module does not import jax, so the request parser can use the table. `training.losses.LOSS_FUNCTIONS`
contains the formula of each loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from skyrl_tx_server.engine.operations import TrainDatum


class LossFn(StrEnum):
    """The `loss_fn` of a request."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The `loss_fn_config` of a request. The fields are the options of all losses, with their defaults. A
    request may set only those of its own loss (`LossSpec.options`)."""

    clip_low_threshold: float = 0.8  # the minimum of the importance ratio, not its distance from 1
    clip_high_threshold: float = 1.2  # the maximum of the importance ratio
    beta: float = 0.05  # the weight of the quadratic term of dro


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionRange:
    """The values that an option may have, both ends included."""

    minimum: float = 0.0
    maximum: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        if self == OptionRange():
            return "a finite number, not negative"
        return f"a finite number between {self.minimum:g} and {self.maximum:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """The inputs and options of a loss, the positions where it has a gradient, and for gspo the function that
    computes its sequence term."""

    inputs: frozenset[str]  # names of `loss_fn_inputs`
    optional_inputs: frozenset[str] = frozenset()  # a subset of `inputs`
    options: Mapping[str, OptionRange]  # names of `LossSettings` fields
    has_gradient: Callable[[TrainDatum], np.ndarray]  # [N] bool: the loss at this position has a gradient
    takes_several_targets: bool = False  # `target_tokens` may be [N, K]
    # None, except for a loss that has one importance ratio per sequence (gspo). The arguments are a datum
    # and the model's logprobs [N], which an extra forward pass computes first. In the result, a copy of the
    # datum, the sequence term replaces the sampler's logprobs.
    add_sequence_term: Callable[[TrainDatum, np.ndarray], TrainDatum] | None = None


def _where_weighted(datum: TrainDatum) -> np.ndarray:
    if datum.weights is None:
        return _everywhere(datum)
    return (datum.weights.reshape(len(datum.tokens), -1) != 0).any(axis=1)


def _where_advantage(datum: TrainDatum) -> np.ndarray:
    assert datum.advantages is not None, "the request parser requires advantages"
    return datum.advantages != 0


def _everywhere(datum: TrainDatum) -> np.ndarray:
    return np.ones(len(datum.tokens), bool)


def mean_log_ratio(datum: TrainDatum, logprobs: np.ndarray) -> TrainDatum:
    """Return a copy of the datum in which each value of the field `logprobs` is gspo's sequence term.

    The argument `logprobs` [N] float32 contains the model's logprobs. The term is the mean of (the argument
    `logprobs` - `datum.logprobs`) over the tokens whose `sequence_ratio_mask` is not 0. If there are no such
    tokens, the term is 0.
    """
    assert datum.logprobs is not None and datum.sequence_ratio_mask is not None, (
        "the request parser requires both"
    )
    counted = datum.sequence_ratio_mask != 0
    mean = np.mean((logprobs - datum.logprobs)[counted], dtype=np.float64) if counted.any() else 0.0
    return replace(datum, logprobs=np.full(len(logprobs), mean, np.float32))


_POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP_OPTIONS = {"clip_low_threshold": OptionRange(), "clip_high_threshold": OptionRange()}

LOSSES: dict[LossFn, LossSpec] = {
    LossFn.CROSS_ENTROPY: LossSpec(
        inputs=frozenset({"target_tokens", "weights"}),
        optional_inputs=frozenset({"weights"}),
        options={},
        has_gradient=_where_weighted,
        takes_several_targets=True,
    ),
    LossFn.IMPORTANCE_SAMPLING: LossSpec(inputs=_POLICY_INPUTS, options={}, has_gradient=_where_advantage),
    LossFn.PPO: LossSpec(inputs=_POLICY_INPUTS, options=_CLIP_OPTIONS, has_gradient=_where_advantage),
    LossFn.CISPO: LossSpec(inputs=_POLICY_INPUTS, options=_CLIP_OPTIONS, has_gradient=_where_advantage),
    # The quadratic term of dro has a gradient for every advantage, including 0.
    LossFn.DRO: LossSpec(inputs=_POLICY_INPUTS, options={"beta": OptionRange()}, has_gradient=_everywhere),
    LossFn.GSPO: LossSpec(
        inputs=_POLICY_INPUTS | {"sequence_ratio_mask"},
        options=_CLIP_OPTIONS,
        has_gradient=_where_advantage,
        add_sequence_term=mean_log_ratio,
    ),
}
