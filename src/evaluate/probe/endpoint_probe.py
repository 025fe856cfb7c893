"""The client that the checks of an endpoint share.

Adam's steps do not depend on the scale of the gradients. All optimizer steps except those of the check of
beta2 therefore use a very large epsilon, with which a step is gradient descent with momentum
(w: weights, m and v: Adam's first and second moments):

    w -= lr * m / (sqrt(v) + eps)   ->   w -= (lr / eps) * m        for eps >> sqrt(v)

If the gradient of a step is multiplied by a factor such as 2, the change of the text's mean logprob by the
step is multiplied by about the same factor. The change therefore shows whether gradients were summed,
clipped, kept or cleared. `Probe.change` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker

HUGE = 1e4  # an epsilon that is much larger than sqrt(v)
RANK = 8
TEXT = [5, 9, 14, 6, 33, 21, 17, 8, 40, 12, 7, 29]  # arbitrary token ids
OTHER = [11, 30, 6, 25, 19, 44, 10, 35, 13, 22, 38, 9]


class Defect(Exception):
    """The endpoint lacks a property that a check expects. The message describes the observation."""


@dataclass(kw_only=True)
class Probe:
    """An endpoint, a model, and the operations that the checks share."""

    service: tinker.ServiceClient
    model_name: str
    max_context_length: int | None  # in tokens; None: the endpoint states no limit
    tolerance: float  # the largest accepted mean absolute difference of logprobs, in nats
    # The ratio of learning rate to epsilon. The first call of `one_step` chooses a ratio with which a step
    # increases the mean logprob of TEXT by 0.01 to 0.08.
    rate: float = 0.0
    step_change: float = 0.0  # the change of the mean logprob by one step with this ratio

    def client(self, seed: int = 1) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(self.model_name, rank=RANK, seed=seed).result()

    def logprobs(self, client: tinker.TrainingClient, text: Sequence[int] = TEXT) -> np.ndarray:
        return logprobs_of(client.forward([cross_entropy(text)], "cross_entropy").result())

    def mean(self, client: tinker.TrainingClient) -> float:
        """Return the mean logprob of TEXT."""
        return float(self.logprobs(client).mean())

    def step(self, client: tinker.TrainingClient, weights: Sequence[float], **adam: float) -> float:
        """Run one forward_backward of TEXT for each of the token weights `weights`, then one optimizer step.

        The step is plain gradient descent unless `adam` has other options. Return the mean logprob of TEXT
        before the step.
        """
        outputs = [
            client.forward_backward([cross_entropy(TEXT, weight)], "cross_entropy").result()
            for weight in weights
        ]
        options = {"learning_rate": self.rate * HUGE, "eps": HUGE, "beta1": 0.0, "beta2": 0.5} | adam
        client.optim_step(tinker.AdamParams(**options)).result()
        return float(logprobs_of(outputs[0]).mean())

    def change(self, client: tinker.TrainingClient, weights: Sequence[float], **adam: float) -> float:
        """Return the change of the mean logprob of TEXT by one step."""
        before = self.step(client, weights, **adam)
        return self.mean(client) - before

    def stepped_client(self) -> tuple[tinker.TrainingClient, float]:
        """Return a client after one step, and the change of the mean logprob of TEXT by this step."""
        self.one_step()
        client = self.client()
        return client, self.change(client, [1.0])

    def one_step(self) -> float:
        """Return the change of the mean logprob of TEXT by one step. The first call determines `rate`."""
        if not self.rate:
            self.rate = 1e-3
            for _ in range(12):
                self.step_change = self.change(self.client(), [1.0])
                if 0.01 <= self.step_change <= 0.08:
                    return self.step_change
                self.rate *= min(10.0, max(0.1, 0.03 / self.step_change)) if self.step_change > 1e-9 else 10.0
            self.rate = 0.0
            raise Defect(
                "none of 12 learning rates gave a step that increased the mean logprob of the training text "
                "by 0.01 to 0.08"
            )
        return self.step_change

    def base_sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=self.model_name).result()

    def sample(
        self, sampler: tinker.SamplingClient, prompt: Sequence[int] = TEXT, **params: object
    ) -> tinker.SampledSequence:
        options: dict[str, object] = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "stop": [], **params}
        sampling_params = tinker.SamplingParams(**options)  # type: ignore[arg-type]
        return (
            sampler.sample(tinker.ModelInput.from_ints(list(prompt)), 1, sampling_params)
            .result()
            .sequences[0]
        )


def logprobs_of(output: tinker.ForwardBackwardOutput) -> np.ndarray:
    """Return the logprobs of the first text in double precision."""
    return output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)


def cross_entropy(text: Sequence[int], weight: float = 1.0) -> tinker.Datum:
    return datum(text, weights=[weight] * (len(text) - 1))


def datum(text: Sequence[int], **inputs: Sequence[float]) -> tinker.Datum:
    tensors = {
        name: tinker.TensorData.from_numpy(np.array(values, dtype=np.float32))
        for name, values in inputs.items()
    }
    target = tinker.TensorData.from_numpy(np.array(text[1:], dtype=np.int64))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(text[:-1])),
        loss_fn_inputs={"target_tokens": target, **tensors},
    )


def expect(condition: bool, observation: str) -> None:
    """Raise Defect with `observation` unless `condition` holds."""
    if not condition:
        raise Defect(observation)


def near(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance
