"""`FakeExecutor`: an executor without devices that logs its calls and raises the errors that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from skyrl_tx_server.engine.executor_protocol import (
    EngineInfo,
    FinishedSequence,
    Job,
    PrefillResult,
    RunningSequence,
)
from skyrl_tx_server.engine.operations import (
    CreateModel,
    Done,
    DropSnapshot,
    ForwardBackward,
    ForwardBackwardResult,
    LoadWeights,
    LoraSpec,
    Op,
    OpResult,
    OptimStep,
    OptimStepResult,
    Sample,
    SampledSequence,
    SaveExternal,
    SaveSampler,
    SaveWeights,
    StopReason,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
)
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoint_record import is_on_disk


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(kw_only=True)
class FakeExecutor:
    """An executor that computes its results without a model.

    The tokens of a sample count up from the last prompt token, and all logprobs are -1. Each dispatch adds
    `block` tokens to every sequence, and a sequence ends after `max_tokens` (default 4) tokens. `run` yields
    between the datums of a ForwardBackward.
    """

    num_slots: int = 4
    block: int = 2
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            base_model="local/fake", max_context_length=64, max_lora_rank=8, vocab_size=1000
        )
    )
    gate: threading.Event = field(default_factory=open_gate)  # operations wait until this event is set
    # Maps an entry of `log` to the error that the call raises after it has logged the entry.
    errors: dict[str, Exception] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    dispatched_next: list[bool] = field(default_factory=list)  # the argument of every `poll`
    threads: set[int] = field(default_factory=set)  # ids of the threads that called the executor
    models: dict[str, LoraSpec] = field(default_factory=dict)
    # Maps (request id, sample index) to the operation and the number of sampled tokens.
    active: dict[tuple[int, int], tuple[Sample, int]] = field(default_factory=dict)

    _paused: dict[tuple[int, int], tuple[Sample, int]] = field(default_factory=dict)
    max_partial_prefill_tokens: int = 0
    num_preempted: int = 0
    prefills_per_dispatch: float = 0.0

    @property
    def sampler(self) -> FakeExecutor:
        return self

    @property
    def num_running(self) -> int:
        return len(self.active)

    def run(self, op: Op) -> Job[OpResult]:
        match op:
            case CreateModel(model_id=model_id, lora=lora):
                self._enter(f"create {model_id}")
                self.models[model_id] = lora
                return Done()
            case LoadWeights(model_id=model_id):
                self._enter(f"load {model_id}")
                lora = self.models.setdefault(model_id, LoraSpec(rank=4))
                return WeightsLoaded(model_id=model_id, lora=lora)
            case ForwardBackward(model_id=model_id, data=data):
                for number, _ in enumerate(data):
                    if number:
                        yield
                    self._enter(f"forward_backward {model_id} {number}")
                logprobs = tuple(np.full(len(datum.tokens), -1.0, np.float32) for datum in data)
                return ForwardBackwardResult(
                    logprobs=logprobs, metrics={"loss:sum": float(sum(len(datum.tokens) for datum in data))}
                )
            case OptimStep(model_id=model_id):
                self._enter(f"optim {model_id}")
                return OptimStepResult(metrics={"grad_norm": 1.0})
            case SaveWeights(model_id=model_id, name=name):
                self._enter(f"save {model_id}")
                return WeightsSaved(path=f"tinker://{model_id}/weights/{name}", size_bytes=1)
            case SaveSampler(weights=weights):
                self._enter(f"snapshot {weights}")
                return WeightsSaved(path=weights if is_on_disk(weights) else None, size_bytes=1)
            case SaveExternal(model_id=model_id, name=name):
                self._enter(f"export {model_id}")
                return WeightsSaved(path=f"tinker://{model_id}/external_weights/{name}", size_bytes=1)
            case UnloadModel(model_id=model_id):
                self._enter(f"unload {model_id}")
                self.models.pop(model_id, None)
                return Done()
            case DropSnapshot(weights=weights):
                self._enter(f"drop {weights}")
                return Done()
            case Sample():
                raise AssertionError("a Sample is prefilled by the sampler")

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult | None]:
        request = requests[0]
        if not request.paused:
            return [self.admit_one(request.request_id, request.op, first=request.first, count=request.count)]
        self._enter(f"admit {request.op.weights} {request.first} again")
        self.active[request.request_id, request.first] = self._paused.pop((request.request_id, request.first))
        return [
            PrefillResult(prompt_logprobs=None, prompt_cache_hit_tokens=len(request.op.prompt), finished=())
        ]

    def admit_one(self, request_id: int, op: Sample, *, first: int, count: int) -> PrefillResult:
        """Start the samples `first` to `first + count - 1` of a request.

        Raises UserError if the prompt and `max_tokens` exceed the context length.
        """
        self._enter(f"admit {op.weights} {first}+{count}")
        if len(op.prompt) + (op.settings.max_tokens or 0) > self.info.max_context_length:
            raise UserError("Prompt length plus max_tokens exceeds the model's context window")
        assert self.num_running + count <= self.num_slots
        for index in range(first, first + count):
            self.active[request_id, index] = (op, 0)
        logprobs = None
        if op.prompt_logprobs and first == 0:
            logprobs = np.full(len(op.prompt), -1.0, np.float32)
            logprobs[0] = np.nan
        # The samples that are admitted first write the prompt to the prefix cache. Later samples reuse it.
        num_cached = len(op.prompt) - 1 if first else 0
        return PrefillResult(prompt_logprobs=logprobs, prompt_cache_hit_tokens=num_cached, finished=())

    def decode(self) -> bool:
        try:
            self._enter("decode")
        except Exception:
            self.active.clear()
            self._paused.clear()
            raise
        return any(
            sampled + self.block >= (op.settings.max_tokens or 4) for op, sampled in self.active.values()
        )

    def poll(self, *, dispatch_next: bool) -> Sequence[FinishedSequence]:
        self.dispatched_next.append(dispatch_next)
        finished = []
        for (request_id, index), (op, sampled) in list(self.active.items()):
            length = op.settings.max_tokens or 4
            if sampled + self.block < length:
                self.active[request_id, index] = (op, sampled + self.block)
                continue
            del self.active[request_id, index]
            tokens = (int(op.prompt[-1]) + 1 + np.arange(length)) % self.info.vocab_size
            sequence = SampledSequence(
                tokens=tokens.astype(np.int32),
                logprobs=np.full(length, -1.0, np.float32),
                stop_reason=StopReason.LENGTH,
            )
            finished.append(FinishedSequence(request_id=request_id, index=index, sequence=sequence))
        return finished

    def pause(self, sequences: Collection[tuple[int, int]]) -> None:
        assert not self.dispatched_next[-1], "a dispatch is in flight"
        for key in sequences:
            self._enter(f"pause {self.active[key][0].weights} {key[1]}")
            self._paused[key] = self.active.pop(key)

    def running(self, request_id: int) -> Sequence[RunningSequence]:
        return [
            RunningSequence(
                index=index,
                tokens=[int(op.prompt[-1]) + 1 + offset for offset in range(sampled)],
                logprobs=[-1.0] * sampled,
            )
            for (key_id, index), (op, sampled) in {**self.active, **self._paused}.items()
            if key_id == request_id
        ]

    def release(self, request_id: int) -> None:
        self.active = {key: row for key, row in self.active.items() if key[0] != request_id}
        self._paused = {key: row for key, row in self._paused.items() if key[0] != request_id}

    def stats(self) -> dict[str, object]:
        return {"slots": self.num_slots, "slots_used": self.num_running, "compilations": {}}

    def _enter(self, entry: str) -> None:
        """Wait for `gate`, append `entry` to `log`, and raise the error of this entry in `errors`."""
        self.gate.wait()
        self.threads.add(threading.get_ident())
        self.log.append(entry)
        if entry in self.errors:
            raise self.errors[entry]
