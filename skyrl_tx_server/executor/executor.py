"""The executor owns the devices, with the base weights, training models, sampler snapshots and batch runner.

A failed operation leaves a model as it was, with one exception: an optimizer step whose result is not finite
drops the gradient. `forward_backward` adds to the gradient in new buffers, which replace the old buffers when
the operation has succeeded. The optimizer step does not donate its inputs, so the model can keep them if the
step fails.

This file is long because it has one method for each operation and the set-up of the device state.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.stages import Lowered

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.distributed.multihost import SINGLE_RANK, RankGroup
from skyrl_tx_server.engine.executor_protocol import EngineInfo, Job
from skyrl_tx_server.engine.loss_spec import LOSSES
from skyrl_tx_server.engine.operations import (
    CreateModel,
    Done,
    DropSnapshot,
    ForwardBackward,
    ForwardBackwardResult,
    LoadWeights,
    LoraSpec,
    LossFn,
    Op,
    OpResult,
    OptimStep,
    OptimStepResult,
    Sample,
    SaveExternal,
    SaveSampler,
    SaveWeights,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
)
from skyrl_tx_server.errors import ConflictError, NotFoundError, UserError
from skyrl_tx_server.executor import compile_stats, device_memory
from skyrl_tx_server.executor.cache_size import fitting_cache
from skyrl_tx_server.executor.memory_division import divide_memory, fitting_model
from skyrl_tx_server.executor.resolved_model import use_compilation_cache, use_float32_products
from skyrl_tx_server.executor.warmup import start_warmup
from skyrl_tx_server.files.base_model import fingerprint
from skyrl_tx_server.files.checkpoint_record import (
    CheckpointInfo,
    CheckpointKind,
    checkpoint_path,
    is_on_disk,
    parse_path,
)
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import write_adapter
from skyrl_tx_server.model.lora.adapter import (
    Adapter,
    init_adapter,
    place_adapter,
    trainable_mask,
    zero_adapter,
)
from skyrl_tx_server.model.mesh import on_gpu, to_host
from skyrl_tx_server.model.weight_layout import with_weight_layout
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.batch_runner import BatchRunner
from skyrl_tx_server.sampling.model_runner import ModelRunner
from skyrl_tx_server.training.losses import LossSelection, select_loss
from skyrl_tx_server.training.packing import MicroBatch, dummy_batch, pack, unpack
from skyrl_tx_server.training.train_step import (
    TokenOutputs,
    adam_from_arrays,
    adam_scalars,
    adam_step,
    adam_to_arrays,
    forward,
    forward_backward,
    init_adam,
    place_adam,
)
from skyrl_tx_server.training.training_model_pool import (
    TrainingModel,
    TrainingModelPool,
    available_host_bytes,
)

logger = logging.getLogger(__name__)


class DeviceExecutor:
    """Implements `Executor` on the devices of this process, or of several ranks that make the same calls (see
    `multihost`)."""

    def __init__(self, settings: EngineOptions, ranks: RankGroup = SINGLE_RANK) -> None:
        self._ranks = ranks
        use_compilation_cache(settings)
        compile_stats.watch()
        # This call initializes JAX and returns only when all ranks have made it. It must precede the
        # broadcast, in which only rank 0 would make it.
        jax.local_devices()
        available = ranks.broadcast_from_rank0(lambda: device_memory.free_bytes(settings))
        model = fitting_model(settings, available)
        dtype = model.dtype
        use_float32_products(dtype)
        self.memory = divide_memory(model, available, ranks)
        cache_size = fitting_cache(model, self.memory.cache_bytes)
        logger.info("loading %s", settings.model_dir)
        self._config = with_weight_layout(
            model.config, dtype=dtype, num_slots=cache_size.slots, max_lora_rank=settings.max_lora_rank
        )
        self._params = load_params(settings.model_dir, self._config, dtype)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))
        logger.info("loaded %.2f GiB of weights", num_bytes / 2**30)
        self._store = CheckpointStore(
            settings.checkpoints_path,
            settings.alias,
            fingerprint(settings.model_dir),
            quota_bytes=settings.checkpoint_quota_bytes,
            tenant_quota=settings.tenant_quota,
        )
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._max_lora_rank = settings.max_lora_rank
        self._train_shapes = model.train_shapes
        self._models = TrainingModelPool(max_on_device=model.max_models, ranks=ranks)
        self._no_gradient = place_adapter(self._config, zero_adapter(self._config, settings.max_lora_rank))
        self.adapters = AdapterCache(
            self._config,
            max_lora_rank=settings.max_lora_rank,
            slots=model.max_loras,
            dtype=dtype,
            read=self._read,
            free_host_bytes=lambda: ranks.broadcast_from_rank0(available_host_bytes),
        )
        runner = ModelRunner(
            self._config,
            self._params,
            self.adapters,
            size=cache_size,
            dp_ranks=settings.mesh.batch,
            max_context_length=model.max_context_length,
            steps=settings.decode_steps_per_dispatch,
            dtype=dtype,
            processed_logprobs=settings.logprobs_mode == "processed",
        )
        self.sampler = BatchRunner(
            self._config,
            runner,
            self.adapters,
            size=cache_size,
            dp_ranks=settings.mesh.batch,
            max_context_length=model.max_context_length,
            model_dir=settings.model_dir,
            ranks=ranks,
        )
        self.info = EngineInfo(
            base_model=settings.alias,
            max_context_length=model.max_context_length,
            max_lora_rank=settings.max_lora_rank,
            vocab_size=self._config.vocab_size,
            model_type=self._config.model_type,
            eos_token_ids=self._config.eos_token_ids,
            devices=f"{settings.mesh.devices} {jax.local_devices()[0].device_kind}",
        )

        warmup = on_gpu() and jax.process_count() == 1 if settings.warmup is None else settings.warmup
        if warmup:
            start_warmup(self.programs())

    def programs(self) -> Iterator[tuple[str, Lowered]]:
        """Yield the name and the lowered form of the programs that most servers need.

        The result omits the following programs:

        - the optimizer step
        - the rolled decode programs, which have a loop over the layers
        - the programs that score top-k and target logprobs
        - on a GPU, the decode programs with top-k or top-p filters
        - the training programs for sequences longer than a training batch, and for several targets per
          position
        """
        return itertools.chain(self.sampler.runner.programs(), self._training_programs())

    def _training_programs(self) -> Iterator[tuple[str, Lowered]]:
        loss = select_loss(LossFn.CROSS_ENTROPY)
        shapes = self._train_shapes
        for shape in reversed([shape for shape in shapes.shapes if shape.length <= shapes.budget.length]):
            batch = dummy_batch(shape)
            arguments = (self._no_gradient, self._no_gradient, self._params, batch, loss)
            yield (
                f"forward_backward, {shape.length} tokens",
                forward_backward.lower(
                    *arguments, config=self._config, remat=self.memory.remat(shape.length)
                ),
            )
            yield (
                f"forward, {shape.length} tokens",
                forward.lower(self._no_gradient, self._params, batch, loss, config=self._config),
            )

    def run(self, op: Op) -> Job[OpResult]:
        match op:
            case ForwardBackward():
                return (yield from self._forward_backward(op))
            case OptimStep():
                return self._optim_step(op)
            case CreateModel():
                return self._create(op)
            case LoadWeights():
                return self._load(op)
            case SaveWeights():
                return (yield from self._save(op))
            case SaveSampler():
                return (yield from self._save_sampler(op))
            case SaveExternal():
                return (yield from self._save_external(op))
            case UnloadModel():
                self._models.drop(op.model_id)
                return Done()
            case DropSnapshot():
                self.adapters.drop(op.weights)
                return Done()
            case Sample():
                raise AssertionError("the sampler runs Sample operations")

    def stats(self) -> dict[str, object]:
        return {
            "slots": self.sampler.num_slots,
            "slots_used": self.sampler.num_running,
            "programs": compile_stats.programs(),
            "program_seconds": compile_stats.seconds(),
            "programs_from_cache": compile_stats.cache_hits(),
            **self.sampler.stats(),
            **self._models.stats(),
            **self.adapters.stats(),
            **device_memory.stats(),
        }

    def _forward_backward(self, op: ForwardBackward) -> Job[ForwardBackwardResult]:
        model = self._models.get(op.model_id)
        loss, spec = select_loss(op.loss_fn, op.settings), LOSSES[op.loss_fn]
        trained = [spec.has_gradient(datum) for datum in op.data]
        batches = pack(op.data, trained, self._train_shapes)
        if spec.add_sequence_term is not None:
            result = yield from self._forward(op.model_id, batches, loss)
            yield
            data = [spec.add_sequence_term(*pair) for pair in zip(op.data, result.logprobs, strict=True)]
            batches = pack(data, trained, self._train_shapes)
        if op.forward_only:
            return (yield from self._forward(op.model_id, batches, loss))
        outputs: list[TokenOutputs] = []
        gradient = self._models.get(op.model_id).gradient or self._no_gradient
        for packed in batches:
            if outputs:
                yield
            # Other operations that run during the yield may move the model to host memory.
            model = self._models.get(op.model_id)
            gradient, output = forward_backward(
                model.adapter,
                gradient,
                self._params,
                packed.arrays,
                loss,
                config=self._config,
                remat=self.memory.remat(np.shape(packed.arrays.tokens)[1]),
            )
            outputs.append(to_host(output))
        self._models.put(op.model_id, replace(model, gradient=jax.block_until_ready(gradient)))
        return _result(batches, outputs)

    def _forward(
        self, model_id: str, batches: Sequence[MicroBatch], loss: LossSelection
    ) -> Job[ForwardBackwardResult]:
        """Compute the logprobs and the summed loss. The model does not change."""
        outputs: list[TokenOutputs] = []
        for packed in batches:
            if outputs:
                yield
            adapter = self._models.get(model_id).adapter
            outputs.append(to_host(forward(adapter, self._params, packed.arrays, loss, config=self._config)))
        return _result(batches, outputs)

    def _optim_step(self, op: OptimStep) -> OptimStepResult:
        model = self._models.get(op.model_id)
        gradient = model.gradient or self._no_gradient
        adapter, adam, report = adam_step(
            model.adapter, gradient, model.adam, model.mask, adam_scalars(op.adam)
        )
        grad_norm, all_finite = to_host(report).tolist()
        if not math.isfinite(grad_norm) or not all_finite:
            self._models.put(op.model_id, replace(model, gradient=None))
            term = "update" if math.isfinite(grad_norm) else f"gradient (norm {grad_norm})"
            raise UserError(
                f"optim_step of {op.model_id} was not applied: its {term} is not finite. The weights are "
                "unchanged and the gradient is dropped; use other data, or lower the learning rate or the "
                "advantages"
            )
        self._models.put(op.model_id, replace(model, adapter=adapter, adam=adam, gradient=None))
        return OptimStepResult(metrics={"grad_norm": grad_norm})

    def _create(self, op: CreateModel) -> Done:
        self._check_new_id(op.model_id)
        adapter = init_adapter(self._config, op.lora, self._max_lora_rank)
        self._models.put(op.model_id, self._new_model(op.lora, adapter))
        return Done()

    def _load(self, op: LoadWeights) -> WeightsLoaded:
        model = None
        if op.create:
            self._check_new_id(op.model_id)
        else:
            model = self._models.get(op.model_id)
        if parse_path(op.path)[1] is not CheckpointKind.TRAINING:
            raise UserError(
                f"{op.path} has no optimizer state; load a training checkpoint made by save_state"
            )
        info, arrays = self._read(op.path)
        # The seeds may differ, because SDKs up to 0.36 create the model without the checkpoint's seed.
        if model is not None and replace(model.lora, seed=info.lora.seed) != info.lora:
            differences = ", ".join(
                f"{field.name} is {getattr(info.lora, field.name)} and {getattr(model.lora, field.name)}"
                for field in fields(LoraSpec)
                if field.name != "seed" and getattr(info.lora, field.name) != getattr(model.lora, field.name)
            )
            raise UserError(
                f"the adapters of {op.path} and {op.model_id} differ: {differences}; create a model from the "
                "checkpoint"
            )
        arguments = self._config, info.lora, self._max_lora_rank
        loaded = self._new_model(info.lora, adapter_from_arrays(arrays, *arguments))
        if op.optimizer:
            loaded = replace(loaded, adam=place_adam(self._config, adam_from_arrays(arrays, *arguments)))
        self._models.put(op.model_id, loaded)
        return WeightsLoaded(model_id=op.model_id, lora=info.lora)

    def _save(self, op: SaveWeights) -> Job[WeightsSaved]:
        model = self._models.get(op.model_id)
        arrays = adapter_to_arrays(model.adapter, self._config, model.lora) | adam_to_arrays(
            model.adam, self._config, model.lora
        )
        path = checkpoint_path(op.model_id, CheckpointKind.TRAINING, op.name)
        return (yield from self._write(path, model, arrays, op.user_metadata, overwrite=op.overwrite))

    def _save_sampler(self, op: SaveSampler) -> Job[WeightsSaved]:
        model = self._models.get(op.model_id)
        on_disk = is_on_disk(op.weights)
        arrays = (
            adapter_to_arrays(model.adapter, self._config, model.lora)
            if on_disk or op.peft_directory is not None
            else {}
        )
        if op.peft_directory is not None:
            directory = Path(op.peft_directory)
            yield from self._on_rank0(
                lambda: write_adapter(directory, arrays, model.lora, self.info.base_model, "float32")
            )
        saved = WeightsSaved(path=None, size_bytes=0)
        if on_disk:
            saved = yield from self._write(op.weights, model, arrays, op.user_metadata)
        try:
            # `model.adapter` is on the device even if the pool moved the model to host memory during a yield.
            # `get` would move the model back, which may fail after the checkpoint is on disk.
            self.adapters.put(op.weights, model.adapter)
        except ConflictError:
            # Sequences still use the snapshot of a deleted checkpoint with this name. If the new checkpoint
            # were kept, later samples of it would use the old snapshot.
            if on_disk:
                with contextlib.suppress(NotFoundError):
                    yield from self._on_rank0(lambda: self._store.delete(op.weights))
            raise
        return saved

    def _save_external(self, op: SaveExternal) -> Job[WeightsSaved]:
        model = self._models.get(op.model_id)
        arrays = adapter_to_arrays(model.adapter, self._config, model.lora)
        path = checkpoint_path(op.model_id, CheckpointKind.EXTERNAL, op.name)
        return (yield from self._write(path, model, arrays, {}))

    def _read(self, path: str) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
        return self._ranks.broadcast_from_rank0(lambda: self._store.read(path))

    def _write(
        self,
        path: str,
        model: TrainingModel,
        arrays: Mapping[str, np.ndarray],
        user_metadata: Mapping[str, str],
        *,
        overwrite: bool = False,
    ) -> Job[WeightsSaved]:
        step = int(model.adam.step)
        write = partial(
            self._store.write,
            path,
            arrays,
            lora=model.lora,
            step=step,
            user_metadata=user_metadata,
            overwrite=overwrite,
        )
        info = yield from self._on_rank0(write)
        return WeightsSaved(path=path, size_bytes=info.size_bytes)

    def _on_rank0[Value](self, write: Callable[[], Value]) -> Job[Value]:
        """Call `write` in a thread, so that sequences decode and other models train in the meantime. With
        several ranks, rank 0 calls `write` in the engine thread, and all ranks wait for it."""
        if jax.process_count() > 1:
            return self._ranks.broadcast_from_rank0(write)
        written = self._writer.submit(write)
        yield written
        return written.result()

    def _new_model(self, lora: LoraSpec, adapter: Adapter) -> TrainingModel:
        """Return a model on the device with the initial optimizer state."""
        mask = trainable_mask(self._config, lora, self._max_lora_rank)
        return TrainingModel(
            lora=lora,
            adapter=place_adapter(self._config, adapter),
            adam=place_adam(self._config, init_adam(self._config, self._max_lora_rank)),
            mask=place_adapter(self._config, mask),
        )

    def _check_new_id(self, model_id: str) -> None:
        if model_id in self._models:
            raise ConflictError(
                f"model {model_id} exists already; unload it first, or pass another model_seq_id"
            )


def _result(batches: Sequence[MicroBatch], outputs: Sequence[TokenOutputs]) -> ForwardBackwardResult:
    logprobs = unpack(batches, [np.asarray(output.logprobs) for output in outputs])
    return ForwardBackwardResult(
        logprobs=logprobs, metrics={"loss:sum": sum(float(output.loss) for output in outputs)}
    )
