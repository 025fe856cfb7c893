"""Measure the executor and the engine on one GPU, and compare the measurements with calculated times.

    . scripts/gpu_flags.sh && python -m scripts.bench.gpu model=4b
    ... -m scripts.bench.gpu sections=sampling,kernels time_limit_s=300 compilation_cache=DIRECTORY
    taskset -c 0,1 python -m scripts.bench.gpu model=tiny max_sequences=4 longest=512  # a test on a CPU

Most rows of the output have the measured time. Rows of decode steps with one adapter, of prefill and of
training also have the time that `scripts/simulate/costs.py` calculates for an H200, and the share of the
limit, which is the limit divided by the measured time. The limit is the longer of two times: the time to move
the row's bytes at 4.3 TB/s, and the time to compute its operations at 790 TFLOP/s. According to
`scripts/simulate/costs.py`, both rates were measured on an H200; this project did not measure them. For each
kind of row, the table states the bytes or the operations, whichever usually take longer. N is the number of
weights in the matrices of the layers and of the head; in the operations, N includes only the experts that a
token uses. There are T tokens, L layers, H heads, K key-value heads, hd dimensions per head, and 2 bytes per
value:

    decode step    bytes = 2 N + sum of contexts * 4 L K hd    the weights once, and all keys and values
    prefill        operations per token = 2 N + 2 L H hd T
    LoRA training  operations per token = 4 N + 6 L H hd T     no gradient of the base weights

If a measurement fails, its row shows the error, the script continues, and the exit status is 1. Three options
shorten a run: `sections` selects sections, `time_limit_s` is the number of seconds after which no measurement
starts, and `compilation_cache` keeps compiled programs for the next run. The models have random weights and,
except `tiny`, the shapes of Qwen3. The weights are loaded once for all executors. Except in the section
`kernels`, only calls of the executor or of the engine are timed. The script needs jax[cuda12] or
jax[cuda13], chz, flax, safetensors, tokenizers and zstandard.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import chz
import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench.driver import NUM_ADAPTERS, Driver, opened
from scripts.bench.gpu_models import MODELS, projection_sizes
from scripts.bench.gpu_rows import GpuConfig, Rows
from scripts.bench.kernel_differences import (
    lora_difference,
    normal,
    paged_difference,
    tree_difference,
)
from scripts.bench.kernel_times import KernelTime, kernel_times
from scripts.bench.sides.ours import settings
from scripts.bench.small_model import RANK, make_model
from scripts.simulate.simulation import SimulateConfig, simulate
from scripts.simulate.workload import run_workload
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import SaveSampler, SaveWeights
from skyrl_tx_server.executor import device_memory, executor, memory_division
from skyrl_tx_server.executor.memory_plan import plan_memory
from skyrl_tx_server.model.kernels.lora_kernel import lora_delta
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.shapes import GPU_PREFILL, PREFILL_TILE
from skyrl_tx_server.model.transformer import Remat
from skyrl_tx_server.sampling import model_runner

BATCH_SIZES, STEPS = (64, 256, 8, 1), 16
DECODE_SHARES = {64: 0.65, 256: 0.75}  # number of sequences -> minimum share of the limit
TRAIN_SHARES = {4096: 0.45}  # number of tokens -> minimum share of the limit
MAX_KERNEL_DIFFERENCE = 2e-2  # largest permitted result of each function of `kernel_differences`


def main(config: GpuConfig) -> int:
    names = [section.__name__ for section in SECTIONS]
    if unknown := [name for name in config.sections if name not in names]:
        sys.exit(f"gpu: sections={','.join(unknown)} is unknown; use names from {', '.join(names)}")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")  # the default of the server
    if config.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    device, rows = jax.local_devices()[0], Rows(config)
    dtype = "bfloat16" if on_gpu() else "float32"
    print(f"{device.device_kind}, jax {jax.__version__}, {config.model} in {dtype}")
    loaded_once = mock.patch.object(executor, "load_params", functools.cache(executor.load_params))
    # Do not compile rolled decode programs (with a loop over the layers): no row measures them, and
    # `time_limit_s` includes their compilation.
    unrolled = mock.patch.object(model_runner, "MIN_ROLLED_LAYERS", sys.maxsize)
    with tempfile.TemporaryDirectory() as directory, loaded_once, unrolled:
        model_dir = make_model(Path(directory) / "model", MODELS[config.model], dtype=dtype)
        for section in SECTIONS:
            if rows.is_over or (config.sections and section.__name__ not in config.sections):
                continue
            try:
                section(rows, model_dir, dtype)
            except Exception as error:  # for example if an executor cannot start
                rows.num_failed += 1
                print(f"{section.__name__:58} FAILED: {type(error).__name__}: {error}", flush=True)
            gc.collect()  # the executor is in a reference cycle, and the next executor needs its memory
    print(
        f"{rows.num_failed} rows failed"
        + ("; rows after time_limit_s were not measured" if rows.is_over else "")
    )
    return 1 if rows.num_failed else 0


def sampling(rows: Rows, model_dir: Path, dtype: str) -> None:
    """Measure decode steps for several numbers of sequences and adapters, prefill for several lengths, and
    the operations that save weights."""
    config = rows.config
    context, new = config.context, (2 * config.repeats + 4) * STEPS
    with opened(
        model_dir,
        dtype=dtype,
        max_num_seqs=config.max_sequences,
        max_context_length=max(config.longest, context) + new,
        train_tokens_per_batch=min(config.lengths),
        max_models=1,
        max_loras=NUM_ADAPTERS,
    ) as driver:
        several = min(64, config.max_sequences)
        with_one: float | None = None
        for count in [count for count in BATCH_SIZES if count <= config.max_sequences]:
            prompts = driver.new_sequences([context] * count)
            step_time = rows.time(
                f"decode step, {count} sequences of {context} tokens",
                lambda prompts=prompts: step_s(driver, rows, prompts),
                lambda device, count=count: device.decode_s([context] * count, steps=1, slots=count),
                min_share=DECODE_SHARES.get(count),
            )
            with_one = step_time if count == several else with_one
            if count in DECODE_SHARES:
                rows.kernels(
                    f"decode step, {count} sequences",
                    lambda prompts=prompts: decode_kernels(driver, prompts),
                    repeats=STEPS,
                )
        prompts = driver.new_sequences([context] * several)
        for adapters in (NUM_ADAPTERS, 4, 2):
            with_several = rows.time(
                f"decode step, {several} sequences, {adapters} adapters",
                lambda adapters=adapters: step_s(driver, rows, prompts, adapters=adapters),
            )
            if with_one and with_several:
                ratio = with_several / with_one
                rows.value(f"  relative to 1 adapter ({adapters})", lambda ratio=ratio: ratio, at_most=1.1)
        for length in config.lengths:
            tiles = -(-length // PREFILL_TILE)
            rows.time(
                f"prefill of one prompt of {length} tokens",
                lambda length=length: rows.median_s(lambda: admit_and_release(driver, length)),
                lambda device, tiles=tiles, length=length: sum(
                    device.prefill_s(size, context=length / 2) for size in GPU_PREFILL.batch_sizes(tiles)
                ),
            )
        rows.time(
            "hand-over of weights (save_weights_for_sampler)",
            lambda: rows.median_s(partial(hand_over, driver)),
        )
        rows.time("checkpoint (save_state)", lambda: rows.median_s(partial(save_state, driver)))


def step_s(driver: Driver, rows: Rows, prompts: list[list[int]], *, adapters: int = 1) -> float:
    """Return the duration of one decode step, in seconds."""
    return driver.dispatch_s(prompts, dispatches=rows.config.repeats, steps=STEPS, adapters=adapters) / STEPS


def decode_kernels(driver: Driver, prompts: list[list[int]]) -> list[KernelTime]:
    """Return the times of the kernels of one decode dispatch with STEPS steps."""
    request_ids = driver.admit(prompts, max_tokens=3 * STEPS)
    driver.decode(dispatch_next=False)
    times = kernel_times(partial(driver.decode, dispatch_next=False))
    for request_id in request_ids:
        driver.executor.sampler.release(request_id)
    return times


def admit_and_release(driver: Driver, length: int) -> None:
    for request_id in driver.admit(driver.new_sequences([length]), max_tokens=1):
        driver.executor.sampler.release(request_id)


def hand_over(driver: Driver) -> None:
    driver.run(SaveSampler(model_id="model", weights="adapter-0"))
    jax.block_until_ready(driver.executor.adapters.arrays)


def save_state(driver: Driver) -> None:
    driver.run(SaveWeights(model_id="model", name="benchmark", overwrite=True))


def training(rows: Rows, model_dir: Path, dtype: str) -> None:
    """Measure forward_backward on one sequence, for each length. The name of a row states whether the
    executor keeps the activations or recomputes the layers."""
    config = rows.config
    for length in config.lengths:
        if rows.is_over:
            break
        options = {"dtype": dtype, "max_context_length": length, "train_tokens_per_batch": length}
        with opened(model_dir, **options, max_num_seqs=1, max_models=1) as driver:
            keeps_activations = driver.executor.memory.remat(length) is Remat.ACTIVATIONS
            name = f"training of {length} tokens, " + (
                "activations kept" if keeps_activations else "layers recomputed"
            )
            rows.time(
                name,
                lambda driver=driver, length=length: rows.median_s(lambda: driver.train(length, 1)),
                lambda device, length=length: device.training_s(length),
                min_share=TRAIN_SHARES.get(length) if keeps_activations else None,
            )
            if length in TRAIN_SHARES:
                rows.kernels(
                    name,
                    partial(kernel_times, partial(driver.train, length, 1)),
                )
        del driver
        gc.collect()


def recomputed_training(rows: Rows, model_dir: Path, dtype: str) -> None:
    with (
        mock.patch.object(memory_division, "TRAINING_SHARE_OF_REMAINING_MEMORY", 0.0),
        mock.patch.object(memory_division, "ACTIVATIONS_SHARE_OF_CPU_MEMORY", 0.0),
    ):
        training(rows, model_dir, dtype)


def agents(rows: Rows, model_dir: Path, dtype: str) -> None:
    """Measure how long a load takes, and compare this time with the time that the simulator calculates. In
    the load, concurrent agents take three turns each while training operations run."""
    config = rows.config
    load = SimulateConfig(
        agents=min(64, config.max_sequences),
        prompt_tokens=config.context,
        new_tokens=config.context // 8,
        turns=3,
        turn_tokens=config.context // 8,
        training_ops=4,
        training_tokens=min(config.lengths),
        slots=min(64, config.max_sequences),
        train_tokens_per_batch=min(config.lengths),
    )
    with opened(
        model_dir,
        dtype=dtype,
        max_num_seqs=load.slots,
        max_context_length=load.workload.max_context_length + 1,
        train_tokens_per_batch=load.train_tokens_per_batch,
        max_models=1,
    ) as driver:
        seconds: float | None = None
        for number in range(2):  # the first run compiles programs
            engine = Engine(driver.executor)
            seconds = rows.time(
                f"{load.agents} agents, 3 turns, during {load.training_ops} training operations"
                + ("" if number else ", with compilation"),
                lambda engine=engine: run_workload(load.workload, engine, time.perf_counter).total_s,
            )
            engine.stop()
        simulated_s = simulate(load, rows.predicted).outcome.total_s
        print(f"{'  calculated by the simulator':58} {1e3 * simulated_s:12,.2f} ms")
        if seconds:
            rows.value("  measured relative to calculated", lambda: seconds / simulated_s)


def memory(rows: Rows, model_dir: Path, dtype: str) -> None:
    """Print the memory plan of a server with the default `max_num_seqs`, `max_models`, `max_loras` and
    `max_context_length`, and the peak of the device memory until this section."""
    peak = device_memory.stats().get("device_peak_bytes")
    with tempfile.TemporaryDirectory() as directory:
        unset = dict.fromkeys(("max_num_seqs", "max_models", "max_loras", "max_context_length"))
        print(plan_memory(settings(model_dir, Path(directory), dtype=dtype, **unset)))
    if isinstance(peak, int):
        rows.value("peak of the device memory, GiB", lambda: peak / 2**30)


def kernels(rows: Rows, *_: object) -> None:
    """Print the largest differences between compiled kernels and Pallas' interpreter, and the times of the
    deltas of adapters with and without kernels. A delta is what the LoRA factors add to the output of a
    projection."""
    if not on_gpu():
        print("kernels: this section was skipped, because it needs a GPU")
        return
    rows.value("paged attention, difference", paged_difference, at_most=MAX_KERNEL_DIFFERENCE)
    rows.value("tree attention, difference", tree_difference, at_most=MAX_KERNEL_DIFFERENCE)
    rows.value("deltas of adapters, difference", lora_difference, at_most=MAX_KERNEL_DIFFERENCE)
    for count in [count for count in DECODE_SHARES if count <= rows.config.max_sequences]:
        for name, num_slots in (("products of XLA", None), ("kernels, 1 slot", 1), ("kernels, 8 slots", 8)):
            rows.time(
                f"deltas of one layer, {count} sequences, {name}",
                lambda count=count, num_slots=num_slots: deltas_s(rows, count, num_slots),
            )


def deltas_s(rows: Rows, count: int, num_slots: int | None) -> float:
    """Return how long the deltas of the projections of one layer take in a decode step, in seconds. The
    sequences use `num_slots` LoRA slots. If it is None, they use one slot, and XLA computes the delta of each
    projection as two products; the factors of its parts, such as q, k and v, are concatenated."""
    layers = 8  # with several layers, the launch of the program takes a small part of the time
    leading = (num_slots or 1, layers)
    slots = np.arange(count, dtype=np.int32) % leading[0]
    modules, xs = [], []
    for inputs, widths in projection_sizes(MODELS[rows.config.model]):
        a = normal(0, *leading, inputs, RANK * len(widths))
        if num_slots is None:
            b = [normal(1, layers, a.shape[-1], sum(widths))]
        else:
            b = [normal(1 + part, *leading, RANK, width) for part, width in enumerate(widths)]
        modules.append((a, b))
        xs.append([normal(layer, count, inputs) for layer in range(layers)])

    def delta(x: jax.Array, layer: int, a: jax.Array, b: list[jax.Array]) -> jax.Array:
        if num_slots is None:
            return (x @ a[0, layer]) @ b[0][layer]
        return lora_delta(
            x,
            a,
            b,
            jnp.ones(leading),
            slots=jnp.asarray(slots),
            layer=jnp.int32(layer),
            order=jnp.argsort(slots),
            one_slot=num_slots == 1,
        )

    @jax.jit
    def deltas(
        modules: list[tuple[jax.Array, list[jax.Array]]], xs: list[list[jax.Array]]
    ) -> list[jax.Array]:
        return [
            delta(x[layer], layer, *module)
            for layer in range(layers)
            for x, module in zip(xs, modules, strict=True)
        ]

    return rows.median_s(lambda: jax.block_until_ready(deltas(modules, xs))) / layers


def bf16(rows: Rows, *_: object) -> None:
    """Print the exit status of scripts/check_bf16.py."""
    name = "KL of sampling and training in bfloat16, exit status"
    rows.value(name, partial(bf16_status, rows.config), at_most=0)


def bf16_status(config: GpuConfig) -> float:
    """Run scripts/check_bf16.py with the shape of the model. Return its exit status."""
    model = MODELS[config.model]
    shape = {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }
    arguments = [f"{name}={size}" for name, size in shape.items()]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run(
        [sys.executable, "-m", "scripts.check_bf16", *arguments], env=environment
    ).returncode


SECTIONS = (sampling, training, recomputed_training, agents, memory, kernels, bf16)


if __name__ == "__main__":
    sys.exit(main(chz.entrypoint(GpuConfig, argv=sys.argv[1:], allow_hyphens=True)))
