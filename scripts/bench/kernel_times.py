"""Measure with JAX's profiler how long each GPU kernel runs."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

GPU_PLANE, STREAM_LINE = "/device:GPU", "Stream"
"""Prefixes of names in a profile. A GPU is a plane, and each CUDA stream is a line of this plane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    name: str  # without the numbers that XLA appends
    count: int
    total_s: float


def kernel_times(run: Callable[[], object]) -> list[KernelTime]:
    """Call `run` with the profiler. Return the kernels and memory copies of the GPUs, the longest total time
    first.

    XLA launches each kernel separately while the profiler runs, so the program takes longer than
    the sum of its kernel times.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        files = list(Path(directory).rglob("*.xplane.pb"))
        assert files, "the profiler wrote no file"
        return summed(event for path in files for event in _events(path))


def summed(events: Iterator[tuple[str, float]]) -> list[KernelTime]:
    """Return the summed times of `events` (kernel name, seconds), with one result per kernel.

    >>> summed(iter([("fusion_12", 1.0), ("fusion_7", 2.0), ("paged_attention", 4.0)]))[1]
    KernelTime(name='fusion', count=2, total_s=3.0)
    """
    durations_s: dict[str, list[float]] = defaultdict(list)
    for name, duration_s in events:
        durations_s[re.sub(r"([._]\d+)+$", "", name)].append(duration_s)
    kernels = [
        KernelTime(name=name, count=len(values), total_s=sum(values)) for name, values in durations_s.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.total_s)


def _events(path: Path) -> Iterator[tuple[str, float]]:
    for plane in ProfileData.from_file(str(path)).planes:
        if plane.name.startswith(GPU_PLANE):
            for line in plane.lines:
                if line.name.startswith(STREAM_LINE):
                    yield from ((event.name, event.duration_ns / 1e9) for event in line.events)
