"""The executor: sole owner of the devices. Base weights, live models, sampler snapshots and decode slots, one method per operation.

What a failed step may have destroyed is never the only copy: `forward_backward` goes on from the model's gradient in buffers of its own,
which become the model's when the whole operation is through, and the optimizer step leaves its inputs alone, so after an error a model is
exactly what it was before the operation.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from skyrl_tx_server import compilations
from skyrl_tx_server.base_model import fingerprint
from skyrl_tx_server.cache_size import CacheSize, asked_cache, fitting_cache
from skyrl_tx_server.checkpoints import CheckpointInfo, CheckpointKind, CheckpointStore, checkpoint_path, is_on_disk, parse_path
from skyrl_tx_server.config import EngineSettings
from skyrl_tx_server.engine import Admission, EngineInfo, FailedRow, FinishedRow, RunningRow
from skyrl_tx_server.errors import ConfigError, ConflictError, UserError
from skyrl_tx_server.hosts import ALONE, Hosts
from skyrl_tx_server.live_models import LiveModel, LiveModels, available_host_bytes
from skyrl_tx_server.memory_plan import MemoryPlan, copied_layers_bytes, memory_plan
from skyrl_tx_server.model.config import ModelConfig, stretch_context
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.lora import Adapter, adapter_size, init_adapter, place_adapter, trainable_mask, zero_adapter
from skyrl_tx_server.model.mesh import bytes_per_device, check_device, make_mesh, on_gpu, to_host
from skyrl_tx_server.model.transformer import Remat
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, check_divisible, load_params, param_shapes
from skyrl_tx_server.ops import (
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
from skyrl_tx_server.packing import PackedBatch, TrainShapes, check_data, example, pack, train_shapes, unpack, with_sequence_ratios
from skyrl_tx_server.peft_files import write_adapter
from skyrl_tx_server.scheduler import Admit
from skyrl_tx_server.slots import DecodeSlots
from skyrl_tx_server.snapshots import SnapshotBank
from skyrl_tx_server.steps.losses import LossSelection, check_loss_inputs, select_loss, trained_positions
from skyrl_tx_server.steps.train import (
    TokenOutputs,
    adam_from_arrays,
    adam_scalars,
    adam_step,
    adam_to_arrays,
    forward,
    forward_backward,
    init_adam,
    place_adam,
    train_batch,
)

logger = logging.getLogger(__name__)

DEFAULT_MAX_CONTEXT_LENGTH = 32768
"""Models that claim more get this unless `max_context_length` asks for it: a decode slot holds keys and values for a whole context."""
CACHE_SHARE_OF_CPU_MEMORY = 0.25
CACHE_SHARE_OF_FREE_DEVICE_MEMORY = 0.5
ACTIVATIONS_SHARE_OF_MEMORY = 0.1


class DeviceExecutor:
    """Implements `engine.Executor` on this process's devices, or on those of several processes that all make the same calls (`hosts`)."""

    def __init__(self, settings: EngineSettings, hosts: Hosts = ALONE) -> None:
        self._hosts = hosts
        _use_compilation_cache(settings)
        compilations.watch()
        dtype = _dtype(settings)
        if on_gpu() and dtype == np.float32:
            jax.config.update("jax_default_matmul_precision", "highest")  # or NVIDIA's devices round factors to ten bits (TF32)
        self._config = _on_mesh(settings, _model_config(settings))
        self._params = load_params(settings.model_dir, self._config, dtype)
        self._store = CheckpointStore(
            settings.checkpoints_dir, settings.base_model, fingerprint(settings.model_dir), quota_bytes=settings.checkpoint_quota_bytes
        )
        self._max_lora_rank = settings.max_lora_rank
        context = _context_length(settings, self._config)
        self._train_shapes = _train_shapes(settings, context)
        self._remat = _remat(settings, self._config, dtype, hosts.agreed(lambda: _memory_bytes(settings)))
        self._models = LiveModels(on_device=settings.max_models, hosts=hosts)
        self._no_gradient = place_adapter(self._config, zero_adapter(self._config, settings.max_lora_rank))
        self._snapshots = SnapshotBank(
            self._config,
            max_lora_rank=settings.max_lora_rank,
            slots=settings.max_snapshots,
            dtype=dtype,
            read=self._read,
            free_host_bytes=lambda: hosts.agreed(available_host_bytes),
        )
        cache_budget = _cache_budget_bytes(hosts.agreed(lambda: _memory_bytes(settings)), self._config, dtype)
        self._slots = DecodeSlots(
            self._config,
            self._params,
            self._snapshots,
            size=fitting_cache(settings, self._config, context, dtype, cache_budget),
            groups=settings.mesh.batch,
            max_context_length=context,
            block=settings.decode_block,
            dtype=dtype,
            model_dir=settings.model_dir,
            tempered_logprobs=settings.tempered_logprobs,
            hosts=hosts,
        )
        self.info = EngineInfo(
            base_model=settings.base_model,
            max_context_length=context,
            max_lora_rank=settings.max_lora_rank,
            vocab_size=self._config.vocab_size,
            model_type=self._config.model_type,
            eos_token_ids=self._config.eos_token_ids,
            devices=f"{settings.mesh.devices} {jax.local_devices()[0].device_kind}",
        )

        ahead = on_gpu() and jax.process_count() == 1 if settings.compile_ahead is None else settings.compile_ahead
        if ahead:
            threading.Thread(target=self._compile_ahead, name="compile-ahead", daemon=False).start()

    def _compile_ahead(self) -> None:
        """Every program of sampling and of training that takes long to compile, but for sequences longer than a micro-batch, for several
        targets per position and for likeliest tokens, which few ask for. What is asked for meanwhile
        compiles as ever; what is compiled here is found then. A process that ends waits for the program under way: XLA cannot be left
        while it compiles."""
        began, count = time.monotonic(), 0
        try:
            for name, program in itertools.chain(self._slots.programs(), self._training_programs()):
                if not threading.main_thread().is_alive():
                    return
                program.compile()
                count += 1
                logger.debug("compiled ahead: %s", name)
        except Exception:
            logger.exception("compiling ahead stopped after %d programs; others are compiled when they are asked for", count)
            return
        logger.info("%d programs ready after %.0f s", count, time.monotonic() - began)

    def _training_programs(self) -> Iterator[tuple[str, Lowered]]:
        loss = select_loss(LossFn.CROSS_ENTROPY, {})
        for shape in reversed([shape for shape in self._train_shapes.shapes if shape.length <= self._train_shapes.budget.length]):
            batch = train_batch(example(shape))
            given = (self._no_gradient, self._no_gradient, self._params, batch, loss)
            yield f"forward_backward, {shape.length} tokens", forward_backward.lower(*given, config=self._config, remat=self._remat)
            yield f"forward, {shape.length} tokens", forward.lower(self._no_gradient, self._params, batch, loss, config=self._config)

    # --- sampling -------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def rows_decoding(self) -> int:
        return self._slots.rows_decoding

    def admit(self, admits: Sequence[Admit]) -> Sequence[Admission | None]:
        return self._slots.admit(admits)

    def decode(self) -> bool:
        return self._slots.decode()

    def collect(self, *, go_on: bool) -> Sequence[FinishedRow | FailedRow]:
        return self._slots.collect(go_on=go_on)

    def running(self, ticket: int) -> Sequence[RunningRow]:
        return self._slots.running(ticket)

    def release(self, ticket: int) -> None:
        self._slots.release(ticket)

    # --- everything else ------------------------------------------------------------------------------------------

    def run(self, op: Op) -> Generator[None, None, OpResult]:
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
                return self._save(op)
            case SaveSampler():
                return self._save_sampler(op)
            case SaveExternal():
                return self._save_external(op)
            case UnloadModel():
                self._models.drop(op.model_id)
                return Done()
            case DropSnapshot():
                self._snapshots.drop(op.weights)
                return Done()
            case Sample():
                raise AssertionError("a Sample is admitted, not run")

    def stats(self) -> dict[str, object]:
        return {
            "slots": self.num_slots,
            "slots_used": self.rows_decoding,
            "programs": compilations.programs(),
            "program_seconds": compilations.seconds(),
            "programs_from_cache": compilations.cache_hits(),
            **self._slots.stats(),
            **self._models.stats(),
            **self._snapshots.stats(),
            **_device_memory(),
        }

    def _forward_backward(self, op: ForwardBackward) -> Generator[None, None, ForwardBackwardResult]:
        model = self._models.get(op.model_id)
        check_data(op.data, vocab_size=self._config.vocab_size, max_context_length=self.info.max_context_length)
        check_loss_inputs(op.data, op.loss_fn)
        loss = select_loss(op.loss_fn, op.loss_fn_config)
        trained = [trained_positions(datum, op.loss_fn) for datum in op.data]
        batches = pack(op.data, trained, self._train_shapes)
        if op.loss_fn is LossFn.GSPO:
            logprobs, _ = yield from self._forward(op.model_id, batches, loss)
            yield
            batches = pack(with_sequence_ratios(op.data, logprobs), trained, self._train_shapes)
        if op.forward_only:
            logprobs, total = yield from self._forward(op.model_id, batches, loss)
            return ForwardBackwardResult(logprobs=logprobs, metrics={"loss:sum": total})
        outputs: list[TokenOutputs] = []
        gradient = self._models.get(op.model_id).gradient or self._no_gradient
        for packed in batches:
            if outputs:
                yield
            model = self._models.get(op.model_id)  # others may have sent it to host memory meanwhile
            gradient, output = forward_backward(
                model.adapter, gradient, self._params, train_batch(packed), loss, config=self._config, remat=self._remat
            )
            outputs.append(to_host(output))
        self._models.put(op.model_id, replace(model, gradient=jax.block_until_ready(gradient)))
        return ForwardBackwardResult(logprobs=_logprobs(batches, outputs), metrics={"loss:sum": _loss(outputs)})

    def _forward(
        self, model_id: str, batches: Sequence[PackedBatch], loss: LossSelection
    ) -> Generator[None, None, tuple[tuple[np.ndarray, ...], float]]:
        """(logprobs of each datum, summed loss), leaving the model as it is."""
        outputs: list[TokenOutputs] = []
        for packed in batches:
            if outputs:
                yield
            adapter = self._models.get(model_id).adapter
            outputs.append(to_host(forward(adapter, self._params, train_batch(packed), loss, config=self._config)))
        return _logprobs(batches, outputs), _loss(outputs)

    def _optim_step(self, op: OptimStep) -> OptimStepResult:
        model = self._models.get(op.model_id)
        gradient = model.gradient or self._no_gradient
        adapter, adam, report = adam_step(model.adapter, gradient, model.adam, model.mask, adam_scalars(op.adam))
        grad_norm, all_finite = to_host(report).tolist()
        if not math.isfinite(grad_norm) or not all_finite:
            self._models.put(op.model_id, replace(model, gradient=None))
            what = "update" if math.isfinite(grad_norm) else f"gradient (norm {grad_norm})"
            raise UserError(
                f"optim_step of {op.model_id} not taken: its {what} is not finite. The weights are as they were, the gradient is dropped; "
                "go on with other data, or lower the learning rate or the advantages"
            )
        self._models.put(op.model_id, replace(model, adapter=adapter, adam=adam, gradient=None))
        return OptimStepResult(metrics={"grad_norm": grad_norm})

    def _create(self, op: CreateModel) -> Done:
        self._new_id(op.model_id)
        adapter = init_adapter(self._config, op.lora, self._max_lora_rank)
        self._models.put(op.model_id, self._fresh(op.lora, adapter))
        return Done()

    def _load(self, op: LoadWeights) -> WeightsLoaded:
        model = None
        if op.create:
            self._new_id(op.model_id)
        else:
            model = self._models.get(op.model_id)
        if parse_path(op.path)[1] is not CheckpointKind.TRAINING:
            raise UserError(f"{op.path} holds weights only; load a training checkpoint made by save_state")
        info, arrays = self._read(op.path)
        if model is not None and replace(model.lora, seed=info.lora.seed) != info.lora:  # SDKs up to 0.36 make the model without a seed
            raise UserError(f"{op.path} holds another adapter than {op.model_id}: {info.lora} against {model.lora}; create a model from it")
        loaded = self._fresh(info.lora, adapter_from_arrays(arrays, self._config, info.lora, self._max_lora_rank))
        if op.optimizer:
            loaded = replace(loaded, adam=place_adam(self._config, adam_from_arrays(arrays, self._config, info.lora, self._max_lora_rank)))
        self._models.put(op.model_id, loaded)
        return WeightsLoaded(model_id=op.model_id, lora=info.lora)

    def _save(self, op: SaveWeights) -> WeightsSaved:
        model = self._models.get(op.model_id)
        arrays = adapter_to_arrays(model.adapter, self._config, model.lora) | adam_to_arrays(model.adam, self._config, model.lora)
        path = checkpoint_path(op.model_id, CheckpointKind.TRAINING, op.name)
        return self._write(path, model, arrays, op.user_metadata, overwrite=op.overwrite)

    def _save_sampler(self, op: SaveSampler) -> WeightsSaved:
        model = self._models.get(op.model_id)
        on_disk = is_on_disk(op.weights)
        arrays = adapter_to_arrays(model.adapter, self._config, model.lora) if on_disk or op.peft_directory is not None else {}
        if op.peft_directory is not None:
            directory = Path(op.peft_directory)
            self._hosts.agreed(lambda: write_adapter(directory, arrays, model.lora, self.info.base_model, "float32"))
        saved = self._write(op.weights, model, arrays, op.user_metadata) if on_disk else WeightsSaved(path=None, size_bytes=0)
        self._snapshots.put(op.weights, model.adapter)
        return saved

    def _save_external(self, op: SaveExternal) -> WeightsSaved:
        model = self._models.get(op.model_id)
        arrays = adapter_to_arrays(model.adapter, self._config, model.lora)
        return self._write(checkpoint_path(op.model_id, CheckpointKind.EXTERNAL, op.name), model, arrays, {})

    def _read(self, path: str) -> tuple[CheckpointInfo, dict[str, np.ndarray]]:
        return self._hosts.agreed(lambda: self._store.read(path))

    def _write(
        self, path: str, model: LiveModel, arrays: Mapping[str, np.ndarray], user_metadata: Mapping[str, str], *, overwrite: bool = False
    ) -> WeightsSaved:
        step = int(model.adam.step)
        write = partial(self._store.write, path, arrays, lora=model.lora, step=step, user_metadata=user_metadata, overwrite=overwrite)
        return WeightsSaved(path=path, size_bytes=self._hosts.agreed(write).size_bytes)

    def _fresh(self, lora: LoraSpec, adapter: Adapter) -> LiveModel:
        """A model on the device, with an optimizer that has taken no step."""
        mask = trainable_mask(self._config, lora, self._max_lora_rank)
        return LiveModel(
            lora=lora,
            adapter=place_adapter(self._config, adapter),
            adam=place_adam(self._config, init_adam(self._config, self._max_lora_rank)),
            mask=place_adapter(self._config, mask),
        )

    def _new_id(self, model_id: str) -> None:
        if model_id in self._models:
            raise ConflictError(f"model {model_id} exists already")


def _logprobs(batches: Sequence[PackedBatch], outputs: Sequence[TokenOutputs]) -> tuple[np.ndarray, ...]:
    return unpack(batches, [np.asarray(output.logprobs) for output in outputs])


def _loss(outputs: Sequence[TokenOutputs]) -> float:
    return sum(float(output.loss) for output in outputs)


def _use_compilation_cache(settings: EngineSettings) -> None:
    """Keep every program, however small and quick to compile: a second start then compiles nothing."""
    if settings.compilation_cache_dir is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(settings.compilation_cache_dir.expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _dtype(settings: EngineSettings) -> np.dtype:
    if settings.dtype == "auto":
        return np.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return np.dtype(settings.dtype)


def _model_config(settings: EngineSettings) -> ModelConfig:
    config = load_model_config(settings.model_dir)
    if not settings.stretch_context or settings.max_context_length is None:
        return config
    stretched = stretch_context(config, settings.max_context_length)
    if stretched is not config and stretched.rope_scaling is not None:
        logger.warning("context stretched from %d to %d tokens by YaRN", config.context_length, stretched.context_length)
    return stretched


def _on_mesh(settings: EngineSettings, config: ModelConfig) -> ModelConfig:
    """The same model on the devices that the settings ask for. ConfigError in one line where it cannot be divided over them."""
    check_device()
    check_divisible(config, settings.mesh, decode_slots=settings.decode_slots)
    return replace(config, mesh=make_mesh(settings.mesh))


def _context_length(settings: EngineSettings, config: ModelConfig) -> int:
    if settings.max_context_length is None:
        return min(config.context_length, DEFAULT_MAX_CONTEXT_LENGTH)
    if not 1 <= settings.max_context_length <= config.context_length:
        raise ConfigError(
            f"max_context_length={settings.max_context_length} is outside 1..{config.context_length}, the model's own limit; "
            "stretch_context=true reaches further"
        )
    return settings.max_context_length


def _train_shapes(settings: EngineSettings, context: int) -> TrainShapes:
    return train_shapes(max_context_length=context, tokens_per_batch=settings.train_tokens_per_batch, row_groups=settings.mesh.batch)


def plan_memory(settings: EngineSettings) -> MemoryPlan:
    """What an executor with these settings would hold, with every option as asked for. Loads nothing, but compiles the training program."""
    _use_compilation_cache(settings)
    dtype, config = _dtype(settings), _on_mesh(settings, _model_config(settings))
    context = _context_length(settings, config)
    device, available = jax.local_devices()[0], _memory_bytes(settings)
    each = f", each of {settings.mesh.devices} devices" if config.mesh is not None else ""
    return memory_plan(
        config,
        dtype,
        device=f"{jax.default_backend()} ({device.device_kind}){each}",
        available_bytes=int(available),
        context=context,
        cache=_planned_cache(settings, config, context, dtype, available),
        max_lora_rank=settings.max_lora_rank,
        max_models=settings.max_models,
        max_snapshots=settings.max_snapshots,
        shapes=_train_shapes(settings, context),
        remat=_remat(settings, config, dtype, available),
    )


def _planned_cache(settings: EngineSettings, config: ModelConfig, context: int, dtype: np.dtype, available_bytes: float) -> CacheSize:
    """What is asked for, but where pages are read as they lie and no option says how many, as many as a server would find room for."""
    asked = asked_cache(settings, config, context, dtype)
    if settings.cache_tokens is not None or asked.copied_pages:
        return asked
    adapter = adapter_size(config, settings.max_lora_rank)
    held = bytes_per_device(param_shapes(config, dtype)) + (4 + (settings.max_snapshots + 1) * dtype.itemsize) * adapter
    return fitting_cache(settings, config, context, dtype, _cache_budget_bytes(available_bytes - held, config, dtype))


def _remat(settings: EngineSettings, config: ModelConfig, dtype: np.dtype, available_bytes: float) -> Remat:
    """Keep the matrix products for the backward pass where they fit, else each layer's input alone, which takes about 1.2 times as long."""
    return (
        Remat.ACTIVATIONS
        if _bytes_with_products(settings, config, dtype) <= available_bytes * ACTIVATIONS_SHARE_OF_MEMORY
        else Remat.LAYERS
    )


def _bytes_with_products(settings: EngineSettings, config: ModelConfig, dtype: np.dtype) -> int:
    """On one device, of what the layers of a training batch keep, most of it matrix products, and of one layer that is computed again: an
    estimate without a compilation, and the same wherever it is made."""
    experts = config.experts
    copies = 1 if experts is None else experts.per_token + experts.shared
    of_experts = 0 if experts is None else 2 * copies * config.hidden_size
    divided = 3 * sum(config.qkv_widths) + 4 * copies * config.intermediate_size
    one_layer = 6 * config.hidden_size + of_experts + divided // config.tensor_shards
    gate_up = 2 * config.num_layers * config.intermediate_size
    if experts is not None:
        alike = config.num_layers - experts.dense_layers
        gate_up = 2 * (alike * experts.shared * config.intermediate_size + experts.dense_layers * experts.dense_width)
    products = config.num_layers * (config.projected_width + config.qkv_widths[0]) + gate_up
    kept = 2 * config.num_layers * config.hidden_size + products // config.tensor_shards
    tokens = -(-settings.train_tokens_per_batch // settings.mesh.batch)
    return tokens * (kept + one_layer) * dtype.itemsize


def _cache_budget_bytes(free_bytes: float, config: ModelConfig, dtype: np.dtype) -> float:
    share = CACHE_SHARE_OF_CPU_MEMORY if jax.default_backend() == "cpu" else CACHE_SHARE_OF_FREE_DEVICE_MEMORY
    return max(0.0, free_bytes - copied_layers_bytes(config, dtype)) * share


def _device_memory() -> dict[str, object]:
    """Empty where the device keeps no count, as a CPU does."""
    stats = jax.local_devices()[0].memory_stats() or {}
    names = {"bytes_in_use": "device_bytes_in_use", "peak_bytes_in_use": "device_peak_bytes", "bytes_limit": "device_bytes_limit"}
    return {name: stats[key] for key, name in names.items() if key in stats}


def _memory_bytes(settings: EngineSettings) -> float:
    """Free memory of one device; on a CPU its share of all the machine's, because what is free changes from second to second."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (settings.mesh.devices // jax.process_count())
