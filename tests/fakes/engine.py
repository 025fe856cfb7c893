"""A fake engine with deterministic answers, real checkpoints, and a gate that delays operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_tx_server.engine.engine import Watcher
from skyrl_tx_server.engine.executor_protocol import EngineInfo
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    CreateModel,
    Done,
    DropSnapshot,
    ForwardBackward,
    ForwardBackwardResult,
    LoadWeights,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepResult,
    Sample,
    SampledSequence,
    SampleResult,
    SaveExternal,
    SaveSampler,
    SaveWeights,
    StopReason,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
)
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoint_record import is_on_disk
from skyrl_tx_server.files.checkpoints import CheckpointStore

REFUSED_TOKEN = 13
"""The engine raises UserError for a prompt or datum that begins with this token."""

LORA_WEIGHTS = {
    "base_model.model.lm_head.lora_A.weight": np.ones((4, 2), np.float32),
    "base_model.model.lm_head.lora_B.weight": np.zeros((3, 4), np.float32),
}
"""The LoRA arrays of every checkpoint."""


@dataclass(kw_only=True, slots=True)
class FakeModel:
    lora: LoraSpec
    steps: int = 0


class FakeEngine:
    """Executes operations in submission order on one thread, as the real engine does for each model.

    The state of a model is its number of optimizer steps. The tokens of sample i count up from the last
    prompt token, shifted by i plus the number of steps of the sampler's weights, so that tests can check
    which weights were used. Every sampled token has the logprob -0.5. Training returns the logprob -target/10
    at each position.
    """

    def __init__(self, checkpoints: CheckpointStore, *, base_model: str = "local/fake") -> None:
        self.info = EngineInfo(base_model=base_model, max_context_length=128, max_lora_rank=8, vocab_size=64)
        self.gate = threading.Event()  # operations wait until this event is set
        self.gate.set()
        self.executed: list[Operation[Any]] = []
        self.submitted: list[tuple[str, Operation[Any]]] = []  # the tenant and the operation
        self.models: dict[str, FakeModel] = {}
        self.snapshots: dict[str, int] = {}
        self.grad_norm = 1.5
        self.failure: str | None = None
        self._checkpoints = checkpoints
        self._thread = ThreadPoolExecutor(max_workers=1)

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        self.submitted.append((tenant, op))
        return self._thread.submit(self._run, op)

    def stats(self) -> dict[str, object]:
        return {"ops_finished": len(self.executed)}

    def stop(self) -> None:
        self.gate.set()
        self._thread.shutdown()

    def of_type[T](self, op_type: type[T]) -> list[T]:
        """Return the executed operations of this type, in order."""
        return [op for op in self.executed if isinstance(op, op_type)]

    def _run(self, op: Operation[Any]) -> Any:
        self.gate.wait()
        self.executed.append(op)
        return self._handlers[type(op)](self, op)

    def _create(self, op: CreateModel) -> Any:
        self.models[op.model_id] = FakeModel(lora=op.lora)
        return Done()

    def _load(self, op: LoadWeights) -> Any:
        info, arrays = self._checkpoints.read(op.path)
        self.models[op.model_id] = FakeModel(lora=info.lora, steps=int(arrays["steps"][0]))
        return WeightsLoaded(model_id=op.model_id, lora=info.lora)

    def _train(self, op: ForwardBackward) -> Any:
        if any(datum.tokens[0] == REFUSED_TOKEN for datum in op.data):
            raise UserError("a refused datum")
        logprobs = tuple((-datum.target_tokens / 10).astype(np.float32) for datum in op.data)
        weights = [np.ones(len(d.tokens)) if d.weights is None else d.weights for d in op.data]
        loss = -sum(float((w * lp).sum()) for w, lp in zip(weights, logprobs, strict=True))
        return ForwardBackwardResult(logprobs=logprobs, metrics={"loss:sum": loss})

    def _optim(self, op: OptimStep) -> Any:
        self.models[op.model_id].steps += 1
        return OptimStepResult(metrics={"grad_norm": self.grad_norm})

    def _write(
        self, path: str, model_id: str, user_metadata: dict[str, str], *, overwrite: bool = False
    ) -> Any:
        model = self.models[model_id]
        arrays = {"steps": np.asarray([model.steps]), **LORA_WEIGHTS}
        info = self._checkpoints.write(
            path, arrays, lora=model.lora, step=model.steps, user_metadata=user_metadata, overwrite=overwrite
        )
        return WeightsSaved(path=path, size_bytes=info.size_bytes)

    def _save(self, op: SaveWeights) -> Any:
        return self._write(
            f"tinker://{op.model_id}/weights/{op.name}", op.model_id, op.user_metadata, overwrite=op.overwrite
        )

    def _save_sampler(self, op: SaveSampler) -> Any:
        if is_on_disk(op.weights):
            return self._write(op.weights, op.model_id, op.user_metadata)
        self.snapshots[op.weights] = self.models[op.model_id].steps
        return WeightsSaved(path=None, size_bytes=0)

    def _save_external(self, op: SaveExternal) -> Any:
        return self._write(f"tinker://{op.model_id}/external_weights/{op.name}", op.model_id, {})

    def _unload(self, op: UnloadModel) -> Any:
        self.models.pop(op.model_id, None)
        return Done()

    def _drop(self, op: DropSnapshot) -> Any:
        self.snapshots.pop(op.weights, None)
        return Done()

    def _sample(self, op: Sample) -> Any:
        if op.prompt[0] == REFUSED_TOKEN:
            raise UserError("a refused prompt")
        if op.weights is None:
            shift = 0
        elif op.weights in self.snapshots:
            shift = self.snapshots[op.weights]
        else:
            shift = int(self._checkpoints.read(op.weights)[1]["steps"][0])
        prompt_logprobs = np.full(len(op.prompt), -2.0, np.float32)
        prompt_logprobs[0] = np.nan
        return SampleResult(
            sequences=tuple(self._continue(op, shift + index) for index in range(op.num_samples)),
            prompt_logprobs=prompt_logprobs if op.prompt_logprobs else None,
            prompt_cache_hit_tokens=0,
        )

    def _continue(self, op: Sample, shift: int) -> SampledSequence:
        count = 4 if op.settings.max_tokens is None else op.settings.max_tokens
        tokens = (int(op.prompt[-1]) + 1 + shift + np.arange(count)) % self.info.vocab_size
        stops = np.flatnonzero(np.isin(tokens, op.settings.stop_token_ids))
        tokens = tokens[: stops[0] + 1] if stops.size else tokens
        return SampledSequence(
            tokens=tokens.astype(np.int32),
            logprobs=np.full(len(tokens), -0.5, np.float32),
            stop_reason=StopReason.STOP if stops.size else StopReason.LENGTH,
        )

    _handlers: dict[type, Callable[..., Any]] = {  # noqa: RUF012
        CreateModel: _create,
        LoadWeights: _load,
        ForwardBackward: _train,
        OptimStep: _optim,
        SaveWeights: _save,
        SaveSampler: _save_sampler,
        SaveExternal: _save_external,
        UnloadModel: _unload,
        DropSnapshot: _drop,
        Sample: _sample,
    }
