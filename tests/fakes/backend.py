"""`BanditBackend`: a backend whose policy is the softmax of four logits, which are learned from datums."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from dataclasses import dataclass

import numpy as np
import tinker

from src.policy.backend import SavedPaths
from src.policy.sampling_policy import TinkerPolicy

VOCAB = 4  # The sampler returns tokens 0 to 3. Other tokens occur only in prompts.


@dataclass(frozen=True)
class Ready[T]:
    """A completed future."""

    value: T

    def __await__(self) -> Generator[None, None, T]:
        yield from ()
        return self.value


class BanditTrainingClient:
    """A training client whose distribution does not depend on the context.

    `events` contains the names of the calls in order.
    """

    def __init__(self) -> None:
        self.logits = np.zeros(VOCAB)
        self.gradient = np.zeros(VOCAB)
        self.events: list[str] = []
        self.sent: list[list[tinker.Datum]] = []  # one list of datums per forward_backward
        self.adam: list[tinker.AdamParams] = []

    def forward(self, data, loss_fn, loss_fn_config=None) -> Awaitable[tinker.ForwardBackwardOutput]:
        self.events.append("forward")
        logprobs = log_softmax(self.logits)
        targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in data]
        outputs = [
            {
                "logprobs": tinker.TensorData.from_numpy(
                    np.array([logprobs[t] if t < VOCAB else 0.0 for t in row], dtype=np.float32)
                )
            }
            for row in targets
        ]
        return Ready(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={}
            )
        )

    def forward_backward(self, data, loss_fn, loss_fn_config=None) -> Awaitable[tinker.ForwardBackwardOutput]:
        self.events.append("forward_backward")
        self.sent.append(data)
        logprobs = log_softmax(self.logits)
        outputs, loss = [], 0.0
        for datum in data:
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            advantages = datum.loss_fn_inputs["advantages"].to_numpy()
            sampling_logprobs = datum.loss_fn_inputs["logprobs"].to_numpy()
            target_logprobs = np.array(
                [logprobs[token] if token < VOCAB else 0.0 for token in targets], dtype=np.float32
            )
            ratios = np.exp(target_logprobs - sampling_logprobs)
            for token, advantage, ratio in zip(targets, advantages, ratios, strict=True):
                if advantage:
                    self.gradient += advantage * ratio * (np.eye(VOCAB)[token] - np.exp(logprobs))
                    loss -= advantage * ratio
            outputs.append({"logprobs": tinker.TensorData.from_numpy(target_logprobs)})
        return Ready(
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={"loss:sum": loss}
            )
        )

    def optim_step(self, adam) -> Awaitable[tinker.types.OptimStepResponse]:
        self.events.append("optim_step")
        self.adam.append(adam)
        norm = float(np.linalg.norm(self.gradient))
        self.logits = self.logits + adam.learning_rate * self.gradient
        self.gradient = np.zeros(VOCAB)
        return Ready(tinker.types.OptimStepResponse(metrics={"grad_norm": norm}))


class BanditSampler:
    """Samples completions of one token from softmax(logits)."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    def sample(self, prompt, num_samples, sampling_params):
        logprobs = log_softmax(self.logits)
        rng = np.random.default_rng(sampling_params.seed)
        token = int(rng.choice(VOCAB, p=np.exp(logprobs)))
        sequence = tinker.SampledSequence(
            stop_reason="stop", sequence_id="s", _tokens_list=[token], _logprobs_list=[float(logprobs[token])]
        )
        return Ready(tinker.SampleResponse(sequences=[sequence]))

    def compute_logprobs(self, prompt):
        logprobs = log_softmax(self.logits)
        return Ready(
            [None, *(float(logprobs[token]) if token < VOCAB else -1.0 for token in prompt.to_ints()[1:])]
        )


class BanditBackend:
    """Implements `Backend`. `saved` maps checkpoint names to logits."""

    def __init__(self) -> None:
        self.training_client = BanditTrainingClient()
        self.saved: dict[str, np.ndarray] = {}
        self.versions: list[int] = []
        self.opened: list[str | None] = []  # the names that `reference_model` received

    async def policy(self, version: int) -> TinkerPolicy:
        self.versions.append(version)
        return TinkerPolicy(BanditSampler(self.training_client.logits.copy()), version)

    async def reference_model(self, name: str | None = None) -> TinkerPolicy:
        self.opened.append(name)
        return TinkerPolicy(BanditSampler(np.zeros(VOCAB)), 0)

    async def check(self) -> None:
        pass

    async def save(self, name: str) -> SavedPaths:
        self.saved[name] = self.training_client.logits.copy()
        return SavedPaths(
            state_path=f"tinker://run/weights/{name}", sampler_path=f"tinker://run/sampler_weights/{name}"
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())
