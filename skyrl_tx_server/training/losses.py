"""The formulas of the losses, per token. The loss of a request is the sum over all tokens of its sequences.

With lp = log p(target), q the sampler's logprob, A the advantage, w the weight and r = exp(lp - q):

    cross_entropy         -w * lp
    importance_sampling   -r * A
    ppo                   -min(r * A, clip(r, low, high) * A)
    cispo                 -stop_gradient(clip(r, low, high)) * lp * A
    dro                   -(lp * A - beta / 2 * (lp - q)^2)
    gspo                  -min(r' * A, clip(r', low, high) * A)   with   r' = exp(s + lp - stop_gradient(lp))

The s of gspo is one number per sequence, the mean of stop_gradient(lp) - q over the tokens whose
`sequence_ratio_mask` is not 0 (the token variant of GSPO, Zheng et al., arXiv:2507.18071). Every logprob of
the sequence is needed to compute s, so the executor runs a forward pass first and passes s in place of q
(`LossSpec.add_sequence_term`).

`low` and `high` are absolute bounds on the ratio. The index of the loss and the options of the loss are
traced values, so all losses share one compiled program. `engine.loss_spec` describes the inputs and options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from skyrl_tx_server.engine.loss_spec import LossFn, LossSettings
from skyrl_tx_server.model.lora.lora_math import ArrayLike

MAX_LOG_RATIO = 80.0
"""The upper limit of log-ratios in exponentials. A larger value could overflow float32, and an infinite ratio
times a zero advantage is NaN."""

jax.tree_util.register_dataclass(
    LossSettings, data_fields=[field.name for field in fields(LossSettings)], meta_fields=[]
)


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class LossSelection:
    """The loss of a request and its options, as arguments of the training programs."""

    index: ArrayLike  # [] int32, the position of the loss in LOSS_FUNCTIONS
    settings: LossSettings  # every field is [] float32


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The inputs of the losses besides the model's logprobs: float32 arrays that broadcast to the shape of
    the logprobs."""

    weights: ArrayLike
    sampler_logprobs: ArrayLike  # for gspo: the sequence term s, at each token of the sequence
    advantages: ArrayLike
    counts: ArrayLike  # number of sequences that share this loss position; 0 for padding


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """The arguments of a loss function: float32 arrays that broadcast to one shape."""

    logprobs: jax.Array  # log p(target)
    log_ratio: jax.Array  # logprobs - sampler_logprobs
    ratio: jax.Array  # exp(min(log_ratio, MAX_LOG_RATIO))
    clipped_ratio: jax.Array  # ratio, clipped to the thresholds of `settings`
    inputs: LossInputs
    settings: LossSettings  # of the request; every field is [] float32


def cross_entropy(terms: LossTerms) -> jax.Array:
    return jnp.negative(terms.inputs.weights) * terms.logprobs


def importance_sampling(terms: LossTerms) -> jax.Array:
    return -terms.ratio * terms.inputs.advantages


def ppo(terms: LossTerms) -> jax.Array:
    advantages = terms.inputs.advantages
    return -jnp.minimum(terms.ratio * advantages, terms.clipped_ratio * advantages)


def cispo(terms: LossTerms) -> jax.Array:
    return -jax.lax.stop_gradient(terms.clipped_ratio) * terms.logprobs * terms.inputs.advantages


def dro(terms: LossTerms) -> jax.Array:
    log_ratio = terms.log_ratio
    return -(terms.logprobs * terms.inputs.advantages - 0.5 * terms.settings.beta * log_ratio * log_ratio)


def gspo(terms: LossTerms) -> jax.Array:
    advantages, settings = terms.inputs.advantages, terms.settings
    sequence_log_ratio = jnp.minimum(terms.inputs.sampler_logprobs, MAX_LOG_RATIO)
    ratio = jnp.exp(sequence_log_ratio + (terms.logprobs - jax.lax.stop_gradient(terms.logprobs)))
    return -jnp.minimum(
        ratio * advantages,
        jnp.clip(ratio, settings.clip_low_threshold, settings.clip_high_threshold) * advantages,
    )


LOSS_FUNCTIONS: dict[LossFn, Callable[[LossTerms], jax.Array]] = {
    LossFn.CROSS_ENTROPY: cross_entropy,
    LossFn.IMPORTANCE_SAMPLING: importance_sampling,
    LossFn.PPO: ppo,
    LossFn.CISPO: cispo,
    LossFn.DRO: dro,
    LossFn.GSPO: gspo,
}


def select_loss(loss_fn: LossFn, settings: LossSettings | None = None) -> LossSelection:
    """Return a request's loss and its options as arguments of the training programs."""
    return LossSelection(
        index=np.asarray(list(LOSS_FUNCTIONS).index(loss_fn), np.int32),
        settings=jax.tree.map(np.float32, settings or LossSettings()),
    )


def token_losses(selection: LossSelection, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    """Return the loss of each loss position, as float32 in the shape of `logprobs`. The loss of a position in
    one sequence is multiplied by the number of sequences that share the position (`inputs.counts`). The loss
    of padding is zero."""
    log_ratio = logprobs - inputs.sampler_logprobs
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    settings = selection.settings
    terms = LossTerms(
        logprobs=logprobs,
        log_ratio=log_ratio,
        ratio=ratio,
        clipped_ratio=jnp.clip(ratio, settings.clip_low_threshold, settings.clip_high_threshold),
        inputs=inputs,
        settings=settings,
    )
    branches = [lambda loss=loss: loss(terms) for loss in LOSS_FUNCTIONS.values()]
    return jnp.where(inputs.counts > 0, inputs.counts * jax.lax.switch(selection.index, branches), 0.0)
