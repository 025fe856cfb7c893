"""Updates of the weights through the Tinker API.

An update consists of substeps. A substep is one or more forward_backward calls and then one optim_step call.
All requests of an update are sent before the first result is awaited.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import tinker
from tinker.types import LossFnType

from src.core.errors import BackendError, ConfigError, TrainerError
from src.learning.datums import TokenSequence, to_datum
from src.learning.options import CLIPPED_LOSSES, LearnerOptions, OptimizerOptions
from src.policy.sampling_policy import sdk_boundary
from src.policy.training_client import TrainingClient

DEFAULT_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # Tinker's default bounds of the ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedTokens:
    """Logprobs of trained tokens by the sampler and by the trainer, for one forward_backward. The module
    `importance` also uses this class, for one example."""

    # [N] float32, the sampler's logprobs. If TIS has corrected the datums, these are instead the logprobs
    # that the trainer computed before the update.
    sampled_logprobs: np.ndarray
    trained_logprobs: np.ndarray  # [N] float32, the trainer's logprobs


class Learner:
    """Sends datums and optimizer steps to one training client.

    `update_scale` is the option `lora_alpha` divided by the server's alpha. It multiplies the learning rate
    and divides the weight decay, so the decay per step does not change. The adapter adds
    `alpha / rank * B @ A` to a weight. Adam's step does not depend on the size of the gradient, so B changes
    k times as much with a learning rate that is k times as large. The product then changes as it would with
    an alpha that is k times as large. The larger rate also changes A faster, which has little effect on the
    product while B is small.
    """

    def __init__(
        self,
        client: TrainingClient,
        options: LearnerOptions,
        *,
        num_steps: int = 1,
        update_scale: float = 1.0,
    ) -> None:
        self._client = client
        self._options = options
        self._loss_fn: LossFnType = cast(LossFnType, options.loss_name)  # the SDK sends any string
        self._num_steps = num_steps  # number of steps of the whole run
        self._update_scale = update_scale
        # The datums that `add` has sent, and their pending results.
        self._added: list[tuple[list[tinker.Datum], Awaitable[tinker.ForwardBackwardOutput]]] = []

    async def require_loss(self) -> None:
        """Check a `server:` loss by evaluating it on one token. Other losses are not checked.

        Raises ConfigError if the server refuses the loss or its settings.
        """
        if not self._options.is_server_loss:
            return
        token = TokenSequence(
            tokens=np.zeros(2, np.int64),
            sampled=np.array([False, True]),
            logprobs=np.zeros(2, np.float32),
            advantages=np.array([0.0, 1.0], np.float32),
            versions=np.zeros(2, np.int64),
        )
        try:
            await self.logprobs([to_datum(token)])
        except BackendError as error:
            if not isinstance(error.__cause__, tinker.BadRequestError):
                raise
            answer = str(error).partition(": ")[2]
            raise ConfigError(f"loss_fn={self._options.loss_fn}: {answer}") from error

    async def logprobs(self, datums: Sequence[tinker.Datum]) -> list[np.ndarray]:
        """Call `forward` once and return the logprobs of each datum, [T] with 0 for the first token."""
        if not datums:
            return []
        with sdk_boundary("computing the trainer's logprobs"):
            output = await self._client.forward(
                list(datums), self._loss_fn, self._options.loss_settings or None
            )
        return [
            np.concatenate([[0.0], answer["logprobs"].to_numpy()]).astype(np.float32)
            for answer in output.loss_fn_outputs
        ]

    def add(self, datums: Sequence[tinker.Datum]) -> None:
        """Start the gradient computation of datums that belong to the first substep of the next update."""
        if datums:
            with sdk_boundary("training"):
                self._added.append((list(datums), self._gradient(datums)))

    async def update(
        self, datums_per_substep: Sequence[Sequence[tinker.Datum]] = (), *, step: int = 1
    ) -> dict[str, float]:
        """Take the optimizer steps of one update and return the metrics.

        All datums of `add` together have one optimizer step, and each non-empty list of `datums_per_substep`
        has one. `step` is the training step in the learning-rate schedule, counted from 1. Raises
        TrainerError if the logprobs are not finite.
        """
        options = self._options
        rate = learning_rate(options, options.learning_rate, step=step, num_steps=self._num_steps)
        adam = adam_params(options, rate, update_scale=self._update_scale)
        added, self._added = self._added, []
        queued, steps = list(added), []
        with sdk_boundary("training"):
            if added:
                steps.append(self._client.optim_step(adam))
            for datums in filter(None, map(list, datums_per_substep)):
                queued.append((datums, self._gradient(datums)))
                steps.append(self._client.optim_step(adam))
            outputs = [(datums, await gradient) for datums, gradient in queued]
            answers = [await step for step in steps]
        metrics = {"optim/lr": adam.learning_rate, "optim/num_substeps": float(len(steps))}
        if not steps:
            return metrics
        parts = [trained_tokens(_rows(datums, output)) for datums, output in outputs]
        require_finite([part.trained_logprobs for part in parts], step=step)
        metrics |= reported_metrics([output for _, output in outputs], answers)
        kl = sampler_trainer_kl(parts, num_before_step=max(1, len(added)))
        return metrics | kl | clipping(parts, options)

    def _gradient(self, datums: Sequence[tinker.Datum]) -> Awaitable[tinker.ForwardBackwardOutput]:
        return self._client.forward_backward(list(datums), self._loss_fn, self._options.loss_settings or None)


def adam_params(options: OptimizerOptions, rate: float, *, update_scale: float) -> tinker.AdamParams:
    """Return the parameters of one optimizer step. `Learner` explains `update_scale`."""
    return tinker.AdamParams(
        learning_rate=rate * update_scale,
        beta1=options.adam_beta1,
        beta2=options.adam_beta2,
        eps=options.adam_eps,
        weight_decay=options.weight_decay / update_scale,
        grad_clip_norm=options.grad_clip_norm,
    )


def require_finite(logprobs: Sequence[np.ndarray], *, step: int) -> None:
    if not all(np.isfinite(values).all() for values in logprobs):
        raise TrainerError(
            f"step {step}: the logprobs are not finite, so the weights have diverged; resume from the "
            "last checkpoint with a lower learning_rate"
        )


def reported_metrics(
    outputs: Sequence[tinker.ForwardBackwardOutput], answers: Sequence[tinker.types.OptimStepResponse]
) -> dict[str, float]:
    """Return the sum of the losses, and the mean of each metric that the optimizer steps returned."""
    metrics = {"optim/loss": float(sum(output.metrics.get("loss:sum", 0.0) for output in outputs))}
    for name in sorted({name for answer in answers for name in answer.metrics or {}}):
        values = [answer.metrics[name] for answer in answers if answer.metrics and name in answer.metrics]
        metrics[f"optim/{name.partition(':')[0]}"] = float(np.mean(values))
    return metrics


def learning_rate(options: OptimizerOptions, highest: float, *, step: int, num_steps: int) -> float:
    """Return the rate of one step: a linear warm-up to `highest` over `lr_warmup_steps`, then the schedule.

    The schedules `linear` and `cosine` would reach 0 one step after the last: 4 steps of `linear` without
    warm-up have 1, 3/4, 1/2 and 1/4 of the rate. All substeps of a step have the same rate.
    """
    warmup = options.lr_warmup_steps
    if step <= warmup:
        return highest * step / warmup
    progress = min(1.0, (step - warmup - 1) / max(1, num_steps - warmup))
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
        options.lr_schedule
    ]
    return highest * factor


def trained_tokens(rows: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> TrainedTokens:
    """Return the logprobs of the trained tokens, which are the tokens with a nonzero advantage.

    Each row has the advantages, the sampler's logprobs and the trainer's logprobs of a sequence, [T] each.
    """
    kept = [(sampled[advantages != 0], trained[advantages != 0]) for advantages, sampled, trained in rows]
    sampled, trained = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return TrainedTokens(sampled_logprobs=sampled, trained_logprobs=trained)


def _rows(
    datums: Sequence[tinker.Datum], output: tinker.ForwardBackwardOutput
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the rows of `trained_tokens`. `output` has the order of the datums."""
    for datum, answer in zip(datums, output.loss_fn_outputs, strict=True):
        inputs = datum.loss_fn_inputs
        yield inputs["advantages"].to_numpy(), inputs["logprobs"].to_numpy(), answer["logprobs"].to_numpy()


def sampler_trainer_kl(parts: Sequence[TrainedTokens], *, num_before_step: int) -> dict[str, float]:
    """Return metrics of the logprob difference between sampler and trainer.

    The names are those of tinker-cookbook (`optim/`) and SkyRL (`policy/`). `kl_sample_train_v1` and `_v2`
    are Schulman's k1 and k2.

    A part has the trained tokens of one forward_backward call or, in `importance`, of one example. The
    `optim/` metrics use all parts. The `policy/` metrics use the first `num_before_step` parts, which were
    computed before the first optimizer step. With on-policy samples, the differences in these parts come from
    numerical errors alone. The differences in later parts also contain the effect of optimizer steps.
    """
    differences = [part.sampled_logprobs - part.trained_logprobs for part in parts]
    first, difference = np.concatenate(differences[:num_before_step]), np.concatenate(differences)
    sampled = np.concatenate([part.sampled_logprobs for part in parts])
    return {
        "optim/kl_sample_train_v1": float(difference.mean()),
        "optim/kl_sample_train_v2": float(0.5 * np.square(difference).mean()),
        "optim/entropy": float(-sampled.mean()),
        "policy/rollout_train_logprobs_abs_diff_mean": float(np.abs(first).mean()),
        "policy/rollout_train_logprobs_abs_diff_max": float(np.abs(first).max()),
    }


def clipping(parts: Sequence[TrainedTokens], options: LearnerOptions) -> dict[str, float]:
    """Return the share of tokens with an importance ratio outside the clip bounds; {} for losses without
    them."""
    if options.loss_fn not in CLIPPED_LOSSES:
        return {}
    bounds = DEFAULT_CLIP | options.loss_settings
    ratios = np.concatenate([np.exp(part.trained_logprobs - part.sampled_logprobs) for part in parts])
    outside = (ratios < bounds["clip_low_threshold"]) | (ratios > bounds["clip_high_threshold"])
    return {"optim/clip_frac": float(outside.mean())}
