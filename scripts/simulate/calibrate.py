"""Measure how long the programs of the benchmarks' model take on this CPU, and run a load on this CPU.

`scripts.simulate` compares the time of this load with the simulated time.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

from scripts.bench.driver import Driver
from scripts.bench.sides.ours import settings
from scripts.bench.small_model import CONFIG, make_model
from scripts.simulate.costs import Measured
from scripts.simulate.simulation import SimulateConfig, Simulated
from scripts.simulate.workload import Workload, run_workload
from skyrl_tx_server.engine.engine import Engine
from skyrl_tx_server.engine.operations import Sample, SamplingSettings
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.model.shapes import CPU_PREFILL, PREFILL_TILE, segment_ends, train_shapes

REPEATS = 5


@contextlib.contextmanager
def opened(workload: Workload, *, slots: int, train_tokens_per_batch: int, layers: int) -> Iterator[Driver]:
    """Open a driver whose executor has `slots` slots and a context for the longest sequence of the load."""
    with tempfile.TemporaryDirectory() as directory:
        model = replace(CONFIG, num_layers=layers, max_position_embeddings=40_960)
        model_dir = make_model(Path(directory) / "model", model)
        options = {
            "max_context_length": workload.max_context_length + 1,
            "max_num_seqs": slots,
            "train_tokens_per_batch": train_tokens_per_batch,
            "warmup": False,
        }
        yield Driver(DeviceExecutor(settings(model_dir, Path(directory), **options)))


def calibrate(
    driver: Driver,
    workload: Workload,
    *,
    slots: int,
    train_tokens_per_batch: int,
    clock: Callable[[], float],
) -> Measured:
    """Return the median run time of each program that the load needs."""
    executor = driver.executor
    longest, request_ids = workload.max_context_length, itertools.count(10**6)

    def seconds(run: Callable[[], object]) -> float:
        started = clock()
        run()
        return clock() - started

    def admit(prompt: list[int], *, new: int, count: int = 1) -> int:
        """Prefill a prompt, and return its request id."""
        request_id = next(request_ids)
        op = Sample(
            weights=None,
            prompt=np.array(prompt, np.int32),
            settings=SamplingSettings(max_tokens=new, seed=request_id, stop_at_eos=False),
            num_samples=count,
        )
        request = PrefillRequest(request_id=request_id, op=op, first=0, count=count)
        while executor.sampler.prefill([request])[0] is None:
            pass
        return request_id

    def prefill_s(prefix: list[int], tiles: int) -> float:
        times_s = []
        for _ in range(REPEATS + 1):
            (end,) = driver.new_sequences([tiles * PREFILL_TILE])
            times_s.append(seconds(partial(admit, prefix + end, new=1)))
        return median(times_s[1:])

    most_tiles = workload.prompt_tokens // PREFILL_TILE
    (prefix,) = driver.new_sequences([max(1, most_tiles - CPU_PREFILL.long) * PREFILL_TILE])
    prefill: dict[int, tuple[float, float]] = {}
    for tiles in (CPU_PREFILL.short, CPU_PREFILL.long):
        first_s = prefill_s([], tiles)
        admit(prefix, new=1)
        later_s = prefill_s(prefix, tiles)
        prefill[tiles] = first_s, max(0.0, later_s - first_s) / len(prefix)
    decode: dict[int, tuple[float, float]] = {}
    steps = executor.sampler.runner.steps
    for end in segment_ends(longest + 1):
        times = []
        for count in (1, slots):
            length = min(end, longest) - 4 * steps
            request_id = admit(driver.new_sequences([max(1, length)])[0], new=4 * steps, count=count)
            times_s = [seconds(partial(driver.decode, dispatch_next=False)) for _ in range(3)]
            executor.sampler.release(request_id)
            times.append(median(times_s[1:]))
        decode[end] = times[0], times[1]
    training: dict[int, float] = {}
    if workload.training_ops:
        shapes = train_shapes(max_context_length=longest + 1, tokens_per_batch=train_tokens_per_batch).shapes
        for shape in (shape for shape in shapes if shape.length <= train_tokens_per_batch):
            times_s = [seconds(partial(driver.train, shape.length, 1)) for _ in range(3)]
            training[shape.length] = median(times_s[1:])
    return Measured(prefill=prefill, decode=decode, slots=slots, training=training)


def run_on_device(
    executor: DeviceExecutor, config: SimulateConfig, clock: Callable[[], float], *, seed: int = 0
) -> Simulated:
    """Run the load on the device of `executor`. Call `calibrate` first, which compiles the programs, so that
    the measured times include no compilation. Each `seed` gives different prompts."""
    engine = Engine(executor, train_share=config.train_share, clock=clock)
    try:
        outcome = run_workload(config.workload, engine, clock, seed=seed)
    finally:
        engine.stop()
        executor.sampler.runner.wait()
    stats = engine.stats()
    num_dispatches, num_tokens = cast(int, stats["decode_dispatches"]), cast(int, stats["tokens_sampled"])
    return Simulated(
        outcome=outcome,
        work_s=cast("dict[str, float]", stats["work_seconds"]),
        num_decoding=num_tokens / num_dispatches / executor.sampler.runner.steps,
        num_dispatches=num_dispatches,
    )
