"""A bandit backend that saves checkpoints to disk. A checkpoint contains a hash of every training batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker

from src.policy.backend import SavedPaths
from src.policy.sampling_policy import TinkerPolicy
from tests.fakes.backend import VOCAB, BanditSampler, BanditTrainingClient, Ready

Tick = Callable[[], None]  # called at each point at which a test can kill the process


class DiskBanditClient(BanditTrainingClient):
    """A bandit training client with momentum. `history` contains a hash of every batch.

    Because of the momentum, a resumed run gives other results if its optimizer state is not restored.
    """

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.momentum = np.zeros(VOCAB)
        self.history: list[str] = []
        self.tick = tick

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.tick()
        content = json.dumps([datum.model_input.to_ints() for datum in data])
        content += json.dumps([datum.loss_fn_inputs["advantages"].to_numpy().tolist() for datum in data])
        self.history.append(hashlib.sha256(content.encode()).hexdigest()[:16])
        return super().forward_backward(data, loss_fn, loss_fn_config)

    def optim_step(self, adam):
        self.momentum = 0.9 * self.momentum + self.gradient
        norm = float(np.linalg.norm(self.gradient))
        self.logits = self.logits + adam.learning_rate * self.momentum
        self.gradient = np.zeros(VOCAB)
        self.tick()
        return Ready(tinker.types.OptimStepResponse(metrics={"grad_norm": norm}))


class TickingSampler(BanditSampler):
    """Calls `tick` before every sample."""

    def __init__(self, logits: np.ndarray, tick: Tick) -> None:
        super().__init__(logits)
        self.tick = tick

    def sample(self, prompt, num_samples, sampling_params):
        self.tick()
        return super().sample(prompt, num_samples, sampling_params)


class DiskBandit:
    """Implements `Backend`. Loads the checkpoint `load`, or starts from zero logits if it is None."""

    def __init__(self, directory: Path, *, load: str | None = None, tick: Tick = lambda: None) -> None:
        self.training_client = DiskBanditClient(tick)
        self._directory = directory
        self._tick = tick
        if load is not None:
            state = json.loads((directory / load.rpartition("/")[2]).read_text())
            self.training_client.logits = np.array(state["logits"])
            self.training_client.momentum = np.array(state["momentum"])
            self.training_client.history = state["history"]

    async def policy(self, version: int) -> TinkerPolicy:
        self._tick()
        return TinkerPolicy(TickingSampler(self.training_client.logits.copy(), self._tick), version)

    async def reference_model(self, name: str | None = None) -> TinkerPolicy:
        return TinkerPolicy(BanditSampler(np.zeros(VOCAB)), 0)

    async def check(self) -> None:
        pass

    async def save(self, name: str) -> SavedPaths:
        client = self.training_client
        state = {
            "logits": client.logits.tolist(),
            "momentum": client.momentum.tolist(),
            "history": client.history,
        }
        self._directory.mkdir(exist_ok=True)
        self._tick()
        (self._directory / f".{name}").write_text(json.dumps(state))
        (self._directory / f".{name}").replace(self._directory / name)
        self._tick()
        return SavedPaths(
            state_path=f"tinker://bandit/weights/{name}",
            sampler_path=f"tinker://bandit/sampler_weights/{name}",
        )
