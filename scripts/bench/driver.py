"""A driver that calls an executor directly, so that the times of a benchmark do not include the engine."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np

from scripts.bench.compare import random_sequences, timed
from scripts.bench.sides.ours import LORA, datum, settings
from skyrl_tx_server.engine.operations import (
    CreateModel,
    ForwardBackward,
    LossFn,
    Op,
    Sample,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.engine.sample_queue import PROMPTS_PER_PREFILL
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.sampling import decode_programs

NUM_ADAPTERS = 8
WARMUP_ROUNDS = 3
"""If the model has enough layers for a rolled program (a program with a loop over the layers), the first
round compiles it. During the first two rounds, two unrolled programs are compiled: the one for most
sequences, and the one for the number of sequences that decode (`decode_programs`). The last round runs the
program that is then measured."""


class Driver:
    """Calls an executor without the engine. The constructor saves NUM_ADAPTERS sampler snapshots of one
    model, with the names `adapter-0`, `adapter-1`, ..."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self.executor = executor
        self._request_ids, self._seeds = itertools.count(), itertools.count()
        self.run(CreateModel(model_id="model", lora=LORA))
        for number in range(NUM_ADAPTERS):
            self.run(SaveSampler(model_id="model", weights=f"adapter-{number}"))

    def run(self, op: Op) -> object:
        steps = self.executor.run(op)
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                return finished.value

    def train(self, length: int, count: int) -> None:
        data = tuple(datum(sequence) for sequence in self.new_sequences([length + 1] * count))
        self.run(ForwardBackward(model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY))

    def new_sequences(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return random sequences that no earlier call has returned."""
        return random_sequences(lengths, seed=next(self._seeds))

    def admit(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, adapters: int = 1) -> list[int]:
        """Compute all prompts, start their sequences and return their request ids. The first `adapters`
        snapshots are used in turn."""
        waiting: list[PrefillRequest] = []
        for index, prompt in enumerate(prompts):
            op = Sample(
                weights=f"adapter-{index % adapters}",
                prompt=np.array(prompt, np.int32),
                settings=SamplingSettings(max_tokens=max_tokens, seed=index, stop_at_eos=False),
            )
            waiting.append(PrefillRequest(request_id=next(self._request_ids), op=op, first=0, count=1))
        request_ids = [request.request_id for request in waiting]
        while waiting:
            admissions = self.executor.sampler.prefill(waiting[:PROMPTS_PER_PREFILL])
            waiting = [
                request for request, admission in zip(waiting, admissions, strict=False) if admission is None
            ] + waiting[len(admissions) :]
        return request_ids

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        self.admit(prompts, max_tokens=max_tokens)
        while self.executor.sampler.num_running:
            self.decode()

    def decode(self, *, dispatch_next: bool = True) -> None:
        self.executor.sampler.decode()
        self.executor.sampler.poll(dispatch_next=dispatch_next)

    def dispatch_s(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        dispatches: int,
        steps: int,
        adapters: int = 1,
        dispatch_next: bool = True,
    ) -> float:
        """Return the median duration, in seconds, of `dispatches` decode dispatches for all prompts. A decode
        dispatch is one program call that computes `steps` decode steps.

        `steps` must be the executor's `decode_steps_per_dispatch`. WARMUP_ROUNDS rounds of dispatches run
        before the measurement, because the decode programs are compiled in the background.
        """

        def durations_s(count: int) -> list[float]:
            request_ids = self.admit(prompts, max_tokens=(count + 2) * steps, adapters=adapters)
            durations = [
                timed(partial(self.decode, dispatch_next=dispatch_next))().wall_s for _ in range(count)
            ]
            for request_id in request_ids:
                self.executor.sampler.release(request_id)
            return durations

        with mock.patch.object(decode_programs, "USES_BEFORE_COMPILATION", 1):
            for _ in range(WARMUP_ROUNDS):
                durations_s(2)
                self.executor.sampler.runner.wait_for_compilation()
        return median(durations_s(dispatches))


@contextlib.contextmanager
def opened(model_dir: Path, **options: object) -> Iterator[Driver]:
    """Yield the driver of a new executor with these options. The executor has no warmup, so it compiles
    programs only when a call needs them."""
    with tempfile.TemporaryDirectory() as directory:
        yield Driver(DeviceExecutor(settings(model_dir, Path(directory), **(options | {"warmup": False}))))
