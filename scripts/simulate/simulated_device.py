"""An executor that advances a virtual clock instead of running programs.

The executor uses the server's allocation of KV pages, prefix cache, preemption, pauses and decode pipeline.
Only `ModelRunner`, the adapters and the training programs are replaced. Each sampled token is 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from scripts.bench.small_model import CONFIG
from scripts.simulate.costs import Costs
from skyrl_tx_server.engine.executor_protocol import EngineInfo, Job
from skyrl_tx_server.engine.operations import (
    Done,
    ForwardBackward,
    ForwardBackwardResult,
    Op,
    OpResult,
    OptimStep,
    OptimStepResult,
)
from skyrl_tx_server.model.shapes import PAGE_SIZE, PREFILL_TILE, bucket, decode_widths
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.batch_runner import BatchRunner
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch, DecodeLayout, DecodeProgram
from skyrl_tx_server.sampling.decode_step import Carry, DecodeOutputs
from skyrl_tx_server.sampling.model_runner import CacheSize, ModelRunner
from skyrl_tx_server.sampling.prefill_batch import ChunkOutputs, PrefillChunk, PrefillLayout
from skyrl_tx_server.sampling.sequences import SequenceState


@dataclass(kw_only=True, slots=True)
class Clock:
    """The virtual time, and the time at which the device has finished its work, in seconds."""

    now: float = 0.0
    busy_until: float = 0.0

    def __call__(self) -> float:
        return self.now

    def start(self, seconds: float) -> float:
        """Start work that takes `seconds` on the device, and return the time at which it ends."""
        self.busy_until = max(self.now, self.busy_until) + seconds
        return self.busy_until

    def run(self, seconds: float) -> None:
        """Start work that takes `seconds` on the device, and wait until it ends."""
        self.now = self.start(seconds)


class SimulatedExecutor:
    """Implements `Executor`. `clock` is also the clock of the engine."""

    def __init__(
        self,
        costs: Costs,
        *,
        slots: int,
        cache_tokens: int,
        max_context_length: int,
        train_tokens_per_batch: int,
        steps: int = 16,
        prefills_per_dispatch: float | None = None,
    ) -> None:
        """With `prefills_per_dispatch=None`, the scheduler uses the estimate of the server."""
        self.clock = Clock()
        self.info = EngineInfo(
            base_model="local/simulated",
            max_context_length=max_context_length,
            max_lora_rank=32,
            vocab_size=CONFIG.vocab_size,
        )
        self._costs = costs
        self._train_tokens_per_batch = train_tokens_per_batch
        size = CacheSize(
            slots=slots,
            pages=1 + -(-cache_tokens // PAGE_SIZE),
            page_bytes=0,
            context_pages=-(-max_context_length // PAGE_SIZE),
            copied_pages=0,
        )
        self.runner = SimulatedRunner(costs, self.clock, slots=slots, steps=steps)
        self.sampler = SimulatedSampler(
            self.runner,
            size,
            max_context_length=max_context_length,
            given_prefills_per_dispatch=prefills_per_dispatch,
        )

    def run(self, op: Op) -> Job[OpResult]:
        match op:
            case ForwardBackward():
                tokens = sum(len(datum.tokens) for datum in op.data)
                while tokens > 0:
                    self.clock.run(self._costs.training_s(min(tokens, self._train_tokens_per_batch)))
                    tokens -= self._train_tokens_per_batch
                    if tokens > 0:
                        yield
                return ForwardBackwardResult(logprobs=(), metrics={})
            case OptimStep():
                return OptimStepResult(metrics={})
            case _:
                return Done()

    def stats(self) -> dict[str, object]:
        return {"decoding_sequences": self.runner.num_decoding.copy(), **self.sampler.stats()}


class SimulatedSampler(BatchRunner):
    """The server's `BatchRunner` with a `SimulatedRunner`."""

    def __init__(
        self,
        runner: SimulatedRunner,
        size: CacheSize,
        *,
        max_context_length: int,
        given_prefills_per_dispatch: float | None,
    ) -> None:
        super().__init__(
            CONFIG,
            runner,
            cast(AdapterCache, _NoAdapters()),
            size=size,
            dp_ranks=1,
            max_context_length=max_context_length,
            model_dir=Path(),
        )
        self._given_prefills_per_dispatch = given_prefills_per_dispatch

    @property
    def prefills_per_dispatch(self) -> float:
        given = self._given_prefills_per_dispatch
        return super().prefills_per_dispatch if given is None else given

    def decode(self) -> bool:
        ended = super().decode()
        simulated = cast(SimulatedRunner, self.runner)
        if simulated.finished_at:
            simulated.clock.now = max(simulated.clock.now, simulated.finished_at.popleft())
        return ended


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dispatch:
    """Replaces `DecodeDispatch`."""

    sequences: Sequence[tuple[int, int, SequenceState]]  # (index in the batch, slot, sequence)
    positions: Sequence[int]
    remaining: Sequence[int]
    program: DecodeProgram
    batch: _Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    before: Carry


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodeLayout:
    """Replaces `DecodeLayout`."""

    widths: tuple[int, ...]

    def width_of(self, slots: Sequence[int]) -> int:
        return bucket(max(slots) + 1, self.widths)

    def dispatch(self, sequences: Sequence[tuple[int, SequenceState]], *, width: int) -> _Dispatch:
        return _Dispatch(
            sequences=[(slot, slot, sequence) for slot, sequence in sequences],
            positions=[sequence.position for _, sequence in sequences],
            remaining=[sequence.remaining for _, sequence in sequences],
            program=DecodeProgram(width=width, ends=None, max_loras=None),
            batch=_Batch(before=Carry.empty(width)),
        )


@dataclass(kw_only=True, slots=True)
class _PrefillLayout:
    shapes: object


class SimulatedRunner(ModelRunner):
    """Advances the clock by the time of each program, as if the programs of all widths were compiled."""

    def __init__(self, costs: Costs, clock: Clock, *, slots: int, steps: int) -> None:
        self.clock = clock
        self.steps = steps
        self.finished_at = deque[float]()  # end times of the dispatches that the host has not waited for
        self.num_decoding = Counter[int]()  # number of sequences -> number of decode dispatches of this size
        self._costs = costs
        self.prefill_layout = cast(PrefillLayout, _PrefillLayout(shapes=costs.shapes))
        self.decode_layout = cast(DecodeLayout, _DecodeLayout(widths=decode_widths(slots)))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[ChunkOutputs]:
        contexts = [first for chunk in chunks for first, _ in chunk.tiles]
        done = 0
        for tiles in self._costs.shapes.batch_sizes(len(contexts)):
            part = contexts[done : done + tiles]
            context = (sum(part) + len(part) * PREFILL_TILE / 2) / tiles  # padding has no context
            self.clock.run(self._costs.prefill_s(tiles, context=context))
            done += tiles
        return [
            ChunkOutputs(
                logprobs=np.zeros(chunk.length - chunk.cached, np.float32),
                first_tokens=[1] * len(chunk.sequences),
                first_logprobs=[0.0] * len(chunk.sequences),
            )
            for chunk in chunks
        ]

    def first_dispatch(self, sequences: Sequence[tuple[int, SequenceState]]) -> DecodeDispatch:
        layout = self.decode_layout
        return layout.dispatch(sequences, width=layout.width_of([slot for slot, _ in sequences]))

    def can_narrow(self, dispatch: DecodeDispatch) -> bool:
        layout = cast(_DecodeLayout, self.decode_layout)
        return bucket(len(dispatch.sequences), layout.widths) < dispatch.program.width

    def transfer(self, dispatch: DecodeDispatch) -> DecodeDispatch:
        return dispatch

    def decode(self, dispatch: DecodeDispatch, carry: Carry) -> DecodeOutputs:
        simulated, width = cast(_Dispatch, dispatch), dispatch.program.width
        slots = [slot for _, slot, _ in simulated.sequences]
        tokens = np.full((width, self.steps), -1, np.int32)
        active = np.zeros(width, np.bool_)
        for slot, remaining in zip(slots, simulated.remaining, strict=True):
            tokens[slot, : max(0, remaining)] = 1
            active[slot] = remaining > self.steps
        seconds = self._costs.decode_s(simulated.positions, steps=self.steps, slots=width)
        self.finished_at.append(self.clock.start(seconds))
        self.num_decoding[len(slots)] += 1
        outputs = DecodeOutputs(
            tokens=tokens,  # type: ignore[arg-type]
            logprobs=np.zeros(tokens.shape, np.float32),  # type: ignore[arg-type]
            carry=Carry(tokens=np.ones(width, np.int32), active=active),
        )
        return outputs

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.clock.busy_until)
        self.finished_at.clear()

    def reset(self) -> None:
        self.finished_at.clear()


class _NoAdapters:
    """Replaces `AdapterCache`."""

    def pin(self, weights: str | None) -> int:
        return 0

    def check_current(self, weights: str | None) -> None:
        pass

    def unpin(self, weights: str | None) -> None:
        pass

    def retain(self, weights: str | None) -> None:
        pass

    def release(self, weights: str | None) -> None:
        pass

    def key(self, weights: str | None) -> tuple[str | None, int]:
        return weights, 0
