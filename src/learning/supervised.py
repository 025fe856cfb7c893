"""Supervised updates through the Tinker API: the loss `cross_entropy`, averaged over the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched

import numpy as np
import tinker

from src.learning.learner import adam_params, learning_rate, reported_metrics, require_finite
from src.learning.options import OptimizerOptions
from src.policy.sampling_policy import sdk_boundary
from src.policy.training_client import TrainingClient

LOSS = "cross_entropy"


@dataclass(frozen=True, kw_only=True, eq=False)
class SupervisedSequence:
    """A token sequence with a weight per token. The first token is not predicted, so it is not trained."""

    tokens: np.ndarray  # [T] int64
    weights: np.ndarray  # [T] float32, 1 for trained tokens, else 0

    @property
    def num_trained(self) -> int:
        return int((self.weights[1:] != 0).sum())


class SupervisedLearner:
    """Sends supervised batches to one training client. `highest_rate` is the highest learning rate of the
    schedule. `update_scale` multiplies the learning rate and divides the weight decay, as in `Learner`."""

    def __init__(
        self,
        client: TrainingClient,
        options: OptimizerOptions,
        *,
        highest_rate: float,
        num_steps: int,
        update_scale: float = 1.0,
    ) -> None:
        self._client = client
        self._options = options
        self._highest_rate = highest_rate
        self._num_steps = num_steps  # number of steps of the whole run
        self._update_scale = update_scale

    async def update(self, batch: Sequence[SupervisedSequence], *, step: int) -> dict[str, float]:
        """Take one optimizer step on a batch and return its metrics. All trained tokens have the same weight.

        Raises TrainerError if the logprobs are not finite.
        """
        num_trained = sum(sequence.num_trained for sequence in batch)
        rate = learning_rate(self._options, self._highest_rate, step=step, num_steps=self._num_steps)
        adam = adam_params(self._options, rate, update_scale=self._update_scale)
        datums = [to_supervised_datum(sequence, scale=1 / num_trained) for sequence in batch]
        with sdk_boundary("training"):
            gradient, stepping = self._client.forward_backward(datums, LOSS), self._client.optim_step(adam)
            output, answer = await gradient, await stepping
        logprobs = _logprobs(output)
        require_finite(logprobs, step=step)
        return {
            "optim/lr": adam.learning_rate,
            "sft/nll": mean_nll(batch, logprobs),
            "sft/chats": float(len(batch)),
            "sft/tokens": float(sum(len(sequence.tokens) for sequence in batch)),
            "sft/trained_tokens": float(num_trained),
            **reported_metrics([output], [answer]),
        }

    async def nll(self, sequences: Sequence[SupervisedSequence], *, batch_size: int) -> float:
        """Return the mean NLL per trained token, in nats. The model does not change."""
        with sdk_boundary("evaluating"):
            requests = [
                self._client.forward([to_supervised_datum(sequence) for sequence in batch], LOSS)
                for batch in batched(sequences, batch_size)
            ]
            outputs = [await request for request in requests]
        return mean_nll(sequences, [values for output in outputs for values in _logprobs(output)])


def to_supervised_datum(sequence: SupervisedSequence, *, scale: float = 1.0) -> tinker.Datum:
    """Convert a sequence to a datum. Position t of the input predicts token t + 1, so the targets are the
    tokens after the first.

    Tokens [p, a, b] with a and b trained give model_input [p, a], target_tokens [a, b] and weights
    [scale, scale].
    """
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sequence.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(sequence.tokens[1:]),
            "weights": tinker.TensorData.from_numpy((sequence.weights[1:] * scale).astype(np.float32)),
        },
    )


def mean_nll(sequences: Sequence[SupervisedSequence], logprobs: Sequence[np.ndarray]) -> float:
    """Return the mean NLL per trained token, in nats.

    `logprobs` has [T - 1] values per sequence, for all tokens but the first.
    """
    total = sum(
        float(values[sequence.weights[1:] != 0].sum(dtype=np.float64))
        for sequence, values in zip(sequences, logprobs, strict=True)
    )
    return -total / sum(sequence.num_trained for sequence in sequences)


def _logprobs(output: tinker.ForwardBackwardOutput) -> list[np.ndarray]:
    return [answer["logprobs"].to_numpy() for answer in output.loss_fn_outputs]
