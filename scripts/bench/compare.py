"""Compare programs in one run.

The first measured call of each program includes compilation. Then the programs are called alternately, and
the medians of these measured calls are compared.

A compared program is a function of this process, or it runs in its own process (`Side`), possibly with
another Python interpreter, and answers calls in JSON lines (`sides/call_protocol.py`). CPU seconds are
reported in addition to wall time, because wall time also depends on the load of other processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import chz

ROOT = Path(__file__).resolve().parents[2]
MALLOC = (
    "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
)
"""GLIBC_TUNABLES of each program that `side` starts. The allocator keeps freed memory, because page faults
for newly mapped memory would take a tenth of the time of a training step. It also requests huge pages
(`skyrl_tx_server/config/huge_pages.py`)."""


@chz.chz
class RepeatOptions:
    repeats: int = chz.field(default=3, doc="Measured calls of each program, after the first")


@chz.chz
class ModelOptions(RepeatOptions):
    layers: int = chz.field(default=8, doc="Layers of the model; the targets are set for 8")


@chz.chz
class PeerOptions(RepeatOptions):
    """The options of a benchmark that compares our engine with other programs."""

    hf: str | None = chz.field(
        default=None, doc="Python with torch, transformers and peft. None: Hugging Face does not take part"
    )
    tx: str | None = chz.field(
        default=None, doc="Python 3.11 with skyrl[tinker,jax]==0.3.0. None: SkyRL's tx does not take part"
    )
    tx_slots: int = chz.field(
        default=2,
        doc="Adapter slots of SkyRL's tx. It is fastest with 2 (base and one model); its default is 32",
    )


@chz.chz
class ComparisonOptions(PeerOptions, ModelOptions):
    """The options of a benchmark that compares several programs with a model of `layers` layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The times of one measured call of a program, in seconds, and what the call returned."""

    wall_s: float
    cpu_s: float
    result: object = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The times of one program. `wall_s` and `cpu_s` are medians over the measured calls after the first
    call. `first_s` is the wall time of the first call, which includes compilation."""

    wall_s: float
    cpu_s: float
    first_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A compared program that runs in its own process."""

    name: str
    process: subprocess.Popen[str]

    def call(self, method: str, **arguments: object) -> Measurement:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        return self._receive(method)

    def _receive(self, method: str) -> Measurement:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name}: ended in {method} with status {self.process.wait()}; see {log_of(self.name)}"
            )
        answer = json.loads(line)
        return Measurement(wall_s=answer["wall_s"], cpu_s=answer["cpu_s"], result=answer["result"])


@functools.cache
def log_directory() -> Path:
    """Return the directory that the environment variable BENCH_LOGS names, or else a new temporary
    directory."""
    return Path(os.environ.get("BENCH_LOGS") or tempfile.mkdtemp(prefix="bench-"))


def log_of(name: str) -> Path:
    return log_directory() / f"bench-{name.replace(' ', '-')}-{os.getpid()}.log"


@contextlib.contextmanager
def side(name: str, module: str, *arguments: object, python: str = sys.executable) -> Iterator[Side]:
    """Start `python -m scripts.bench.sides.MODULE ARGUMENTS` and wait until it is ready."""
    command = [python, "-m", f"scripts.bench.sides.{module}", *(str(argument) for argument in arguments)]
    environment = os.environ | {
        "GLIBC_TUNABLES": MALLOC,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    with log_of(name).open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit(f"{name}: did not start, status {process.wait()}; see {log_of(name)}")
        yield Side(name=name, process=process)
        log_of(name).unlink()
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()


@contextlib.contextmanager
def peers(
    config: PeerOptions, model_dir: Path, *, recompute: bool = False, tx_micro_batch_size: int = 0
) -> Iterator[dict[str, Side]]:
    """Start the programs whose interpreters are set in the options, and yield the programs by name.
    `recompute` and `tx_micro_batch_size` are settings of SkyRL's tx only."""
    from scripts.bench.small_model import RANK

    threads = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        started = {}
        if config.hf is not None:
            started["HF"] = stack.enter_context(
                side("HF", "hugging_face", model_dir, RANK, threads, python=config.hf)
            )
        if config.tx is not None:
            options = (model_dir, RANK, config.tx_slots, str(recompute).lower(), tx_micro_batch_size)
            started["skyrl-tx"] = stack.enter_context(
                side("skyrl-tx", "skyrl_tx", *options, python=config.tx)
            )
        yield started


def timed(run: Callable[[], object]) -> Callable[[], Measurement]:
    """Return a function that calls `run` in this process and measures its times."""

    def call() -> Measurement:
        began, cpu = time.perf_counter(), time.process_time()
        result = run()
        return Measurement(wall_s=time.perf_counter() - began, cpu_s=time.process_time() - cpu, result=result)

    return call


def interleave(
    calls: Mapping[str, Callable[[], Measurement]], *, repeats: int, between_s: float = 0.3
) -> dict[str, Timing]:
    """Make a first measured call of each program, then `repeats` rounds. A pause between two measured calls
    lets the threads of the previous program become idle."""
    first = {name: call() for name, call in calls.items()}
    rounds: dict[str, list[Measurement]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            time.sleep(between_s)
            rounds[name].append(call())
    return {
        name: Timing(
            wall_s=median(measurement.wall_s for measurement in measured),
            cpu_s=median(measurement.cpu_s for measurement in measured),
            first_s=first[name].wall_s,
        )
        for name, measured in rounds.items()
    }


def report(
    title: str, timings: Mapping[str, Timing], targets: Mapping[str, float], *, baseline: str = "ours"
) -> None:
    """Print the title, and one line per program: its times, their ratios to the times of the program
    `baseline`, and whether the ratio of wall times meets the target.

    `targets` maps a program to its minimum ratio.
    """
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{title}  ({len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, load {load})")
    for name, timing in timings.items():
        line = f"  {name:24} {timing.wall_s:8.3f} s  CPU {timing.cpu_s:8.3f} s  first {timing.first_s:7.2f} s"
        if name != baseline:
            ratio, cpu_ratio = (
                timing.wall_s / timings[baseline].wall_s,
                timing.cpu_s / timings[baseline].cpu_s,
            )
            line += f"  {ratio:6.2f}x (CPU {cpu_ratio:5.2f}x)"
            if name in targets:
                line += f"  {verdict(ratio, at_least=targets[name])}"
        print(line, flush=True)


def print_figure(
    name: str, value: float | str, *, at_least: float | None = None, at_most: float | None = None
) -> None:
    """Print a value, and whether it meets its target if it has one."""
    result = (
        ""
        if isinstance(value, str) or (at_least is None and at_most is None)
        else verdict(value, at_least=at_least, at_most=at_most)
    )
    print(
        f"  {name:56} {value if isinstance(value, str) else format(value, '.4g'):>10}  {result}", flush=True
    )


def verdict(value: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """Return the text that says whether a value meets its target.

    >>> verdict(1.6, at_least=1.5), verdict(0.6, at_most=0.55)
    ('target >= 1.5: met', 'target <= 0.55: MISSED')
    """
    if at_least is not None:
        return f"target >= {at_least:g}: {'met' if value >= at_least else 'MISSED'}"
    assert at_most is not None
    return f"target <= {at_most:g}: {'met' if value <= at_most else 'MISSED'}"


def random_sequences(lengths: Sequence[int], *, seed: int = 0, vocabulary: int = 4096) -> list[list[int]]:
    import numpy as np

    random = np.random.default_rng(seed)
    return [random.integers(3, vocabulary, length).tolist() for length in lengths]
