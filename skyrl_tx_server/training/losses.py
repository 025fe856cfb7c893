"""Tinker's losses, one token at a time. The loss of a request is the plain sum over its tokens and sequences, never a mean.

With lp = log p(target), q the sampler's logprob, A the advantage, w the weight and r = exp(lp - q):

    cross_entropy         -w * lp
    importance_sampling   -r * A
    ppo                   -min(r * A, clip(r, low, high) * A)
    cispo                 -stop_gradient(clip(r, low, high)) * lp * A
    dro                   -(lp * A - beta / 2 * (lp - q)^2)
    gspo                  -min(r' * A, clip(r', low, high) * A)   with   r' = exp(s + lp - stop_gradient(lp))

gspo's s is one number per sequence, the mean of stop_gradient(lp) - q over its mask (Zheng et al., arXiv:2507.18071, in the token form).
It needs every logprob of the sequence before the first loss, so a forward pass computes it and the caller passes it in place of q.

`low` and `high` are absolute bounds on the ratio, 0.8 and 1.2 unless given. Which loss it is and its settings are traced values:
a new loss runs in a program that is already compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.engine.operations import LossFn, LossSettings, TrainDatum
from skyrl_tx_server.model.lora.lora_math import ArrayLike

DEFAULTS = LossSettings()
MAX_LOG_RATIO = 80.0  # exp of more overflows float32, and an infinite ratio times a zero advantage (or a zero gradient) is not a number


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LossSelection:
    """Which loss, and the settings of all of them; scalars."""

    index: ArrayLike  # int32
    clip_low: ArrayLike  # float32
    clip_high: ArrayLike  # float32
    beta: ArrayLike  # float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """What the formulas read besides the model's logprobs; float32, broadcast against these.

    `counts` says how many tokens a loss stands for, with the same inputs and logprob; 0 for padding.
    """

    weights: ArrayLike
    sampler_logprobs: ArrayLike  # gspo: s, the sequence's mean log-ratio, at each of its tokens
    advantages: ArrayLike
    counts: jax.Array


def select_loss(loss_fn: LossFn, settings: LossSettings = DEFAULTS) -> LossSelection:
    """A request's loss, as the programs take it."""
    return LossSelection(
        index=np.asarray(list(LossFn).index(loss_fn), np.int32),
        clip_low=np.asarray(settings.clip_low_threshold, np.float32),
        clip_high=np.asarray(settings.clip_high_threshold, np.float32),
        beta=np.asarray(settings.beta, np.float32),
    )


def trained_positions(datum: TrainDatum, loss_fn: LossFn) -> np.ndarray:
    """[N] bool, where this datum's loss has a gradient at all."""
    match loss_fn:
        case LossFn.CROSS_ENTROPY if datum.weights is not None:
            return (datum.weights.reshape(len(datum.tokens), -1) != 0).any(axis=1)
        case LossFn.CROSS_ENTROPY | LossFn.DRO:  # dro pulls towards the sampler whatever the advantage
            return np.ones(len(datum.tokens), bool)
        case _:
            assert datum.advantages is not None, "checked before"
            return datum.advantages != 0


def token_losses(selection: LossSelection, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    """Each token's loss, float32, of the shape of `logprobs`."""
    delta = logprobs - inputs.sampler_logprobs
    ratio = jnp.exp(jnp.minimum(delta, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, selection.clip_low, selection.clip_high)
    advantages = inputs.advantages

    def gspo() -> jax.Array:
        ratio = jnp.exp(
            jnp.minimum(inputs.sampler_logprobs, MAX_LOG_RATIO) + (logprobs - jax.lax.stop_gradient(logprobs))
        )
        return -jnp.minimum(
            ratio * advantages, jnp.clip(ratio, selection.clip_low, selection.clip_high) * advantages
        )

    branches = (  # in the order of LossFn
        lambda: -inputs.weights * logprobs,
        lambda: -ratio * advantages,
        lambda: -jnp.minimum(ratio * advantages, clipped * advantages),
        lambda: -jax.lax.stop_gradient(clipped) * logprobs * advantages,
        lambda: -(logprobs * advantages - 0.5 * selection.beta * delta * delta),
        gspo,
    )
    return jnp.where(inputs.counts > 0, inputs.counts * jax.lax.switch(selection.index, branches), 0.0)
