"""Run a workload on an engine: agents that sample several turns, and concurrent training operations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import (
    ForwardBackward,
    ForwardBackwardResult,
    LossFn,
    Sample,
    SampleResult,
    SamplingSettings,
    TrainDatum,
)

MODEL_ID = "model"
"""The id of the training model. If the engine runs on a real device (`DeviceExecutor`), create this model
before you call `run_workload`. A simulated device needs no model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work for an engine. Each agent samples `turns` completions. The prompt of each further turn is the
    previous prompt and completion, followed by `turn_tokens` new tokens."""

    agents: int
    prompt_tokens: int
    new_tokens: int
    turns: int = 1
    turn_tokens: int = 0
    training_ops: int = 0  # number of forward_backward operations, which run one after the other
    training_tokens: int = 8192  # number of tokens of each training operation
    vocab_size: int = 4096

    @property
    def max_context_length(self) -> int:
        return self.prompt_tokens + self.turns * self.new_tokens + (self.turns - 1) * self.turn_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The times of a workload, in seconds of the engine's clock since the workload began."""

    total_s: float
    sampling_s: float  # until the last agent has ended
    training_s: float  # until the last training operation has ended; 0 without training
    sampled_at: tuple[tuple[float, int], ...]  # (end, number of tokens) of each completion
    trained_at: tuple[tuple[float, int], ...]  # (end, number of tokens) of each training operation


def run_workload(workload: Workload, engine: Engine, clock: Callable[[], float], *, seed: int = 0) -> Outcome:
    """Submit the workload, start the engine, and wait until all operations have ended or one has failed.
    Raise the error of the first operation that failed."""
    random = np.random.default_rng(seed)
    sampled: list[tuple[float, int]] = []
    trained: list[tuple[float, int]] = []
    errors: list[BaseException] = []
    remaining, finished = (
        itertools.count(workload.agents + bool(workload.training_ops) - 1, -1),
        threading.Event(),
    )

    def tokens(count: int) -> np.ndarray:
        return random.integers(2, workload.vocab_size, count).astype(np.int32)

    def end(error: BaseException | None = None) -> None:
        if error is not None:
            errors.append(error)
        if error is not None or not next(remaining):
            finished.set()

    def sample(prompt: np.ndarray, turn: int, number: int) -> None:
        def done(future: Future[SampleResult]) -> None:  # runs on the engine's thread at the end of the turn
            if (error := future.exception()) is not None:
                return end(error)
            completion = future.result().sequences[0].tokens
            sampled.append((clock() - began, len(completion)))
            if turn == workload.turns:
                return end()
            sample(np.concatenate([prompt, completion, tokens(workload.turn_tokens)]), turn + 1, number)

        settings = SamplingSettings(max_tokens=workload.new_tokens, seed=number, stop_at_eos=False)
        op = Sample(weights=None, prompt=prompt, settings=settings)
        engine.submit(op).add_done_callback(done)

    def train(number: int) -> None:
        def done(future: Future[ForwardBackwardResult]) -> None:
            if (error := future.exception()) is not None:
                return end(error)
            trained.append((clock() - began, workload.training_tokens))
            if number == workload.training_ops:
                return end()
            train(number + 1)

        text = tokens(workload.training_tokens + 1)
        datum = TrainDatum(tokens=text[:-1], target_tokens=text[1:])
        op = ForwardBackward(model_id=MODEL_ID, data=(datum,), loss_fn=LossFn.CROSS_ENTROPY)
        engine.submit(op).add_done_callback(done)

    began = clock()
    for number in range(workload.agents):
        sample(tokens(workload.prompt_tokens), 1, number)
    if workload.training_ops:
        train(1)
    engine.start()
    finished.wait()
    if errors:
        raise errors[0]
    last = [max((end_s for end_s, _ in ends), default=0.0) for ends in (sampled, trained)]
    return Outcome(
        total_s=max(last),
        sampling_s=last[0],
        training_s=last[1],
        sampled_at=tuple(sampled),
        trained_at=tuple(trained),
    )
