"""The options and the rows of `scripts.bench.gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import chz
import numpy as np

from scripts.bench.compare import timed, verdict
from scripts.bench.gpu_models import MODELS, active_size, heads_size, matrix_size
from scripts.bench.kernel_times import KernelTime
from scripts.simulate.costs import DEVICES, ModelSize, Roofline
from skyrl_tx_server.model.kv_cache import page_bytes
from skyrl_tx_server.model.mesh import on_gpu
from skyrl_tx_server.model.shapes import PAGE_SIZE

# lengths with a target come first, because `time_limit_s` may end the run before the other lengths
LENGTHS, CONTEXT = (4096, 1024, 8192, 32_768), 2048
MAX_KERNELS = 12  # maximum number of rows in a table of kernel times


@chz.chz
class GpuConfig:
    model: str = chz.field(default="4b", doc="4b, 8b, 32b, 30b-a3b or tiny")
    max_sequences: int = chz.field(default=256, doc="Largest number of sequences that are decoded together")
    longest: int = chz.field(default=32_768, doc="Largest number of tokens of a prompt or training sequence")
    repeats: int = 5
    sections: tuple[str, ...] = chz.field(default=(), doc="Sections to measure, by name; empty: all sections")
    time_limit_s: float = chz.field(default=float("inf"), doc="Start no measurement after this many seconds")
    compilation_cache: str | None = chz.field(
        default=None, doc="Directory of compiled programs; None: no cache"
    )

    @property
    def lengths(self) -> list[int]:
        return [length for length in LENGTHS if length <= self.longest] or [self.longest]

    @property
    def context(self) -> int:
        """The number of tokens of each sequence when decoding starts."""
        return min(CONTEXT, self.longest)


class Rows:
    """Measures and prints the rows of the output. It starts no measurement after `time_limit_s`."""

    def __init__(self, config: GpuConfig) -> None:
        self.config = config
        self.num_failed = 0
        self._started_at = time.perf_counter()
        model, rates = MODELS[config.model], DEVICES["h200"]
        assert isinstance(rates, Roofline)
        size = ModelSize(
            weights=matrix_size(model),
            active_weights=active_size(model),
            kv_bytes=page_bytes(model, np.dtype("bfloat16")) / PAGE_SIZE,
            attention=heads_size(model),
            layers=model.num_layers,
        )
        self.predicted = replace(rates, model=size)
        self.limit = replace(
            self.predicted, bytes_per_s=4.3e12, flops_per_s=790e12, training_flops_per_s=790e12, launch_s=0.0
        )

    def time(
        self,
        name: str,
        measure: Callable[[], float],
        calculate: Callable[[Roofline], float] | None = None,
        *,
        min_share: float | None = None,
    ) -> float | None:
        """Print the duration that `measure` returns, in milliseconds. With `calculate`, also print the
        calculated duration on an H200 and the share of the limit, and with `min_share` whether the share is
        at least `min_share`. Return the measured duration in seconds, or None if `measure` failed or was not
        called."""
        seconds = self._try(name, measure)
        if seconds is None:
            return None
        text = f"{1e3 * seconds:12,.2f} ms"
        if calculate is not None:
            share = calculate(self.limit) / seconds
            result = "" if min_share is None else verdict(share, at_least=min_share)
            text += f"  calculated {1e3 * calculate(self.predicted):12,.2f} ms"
            text += f"  {share:7.1%} of the limit  {result}"
        print(f"{name:58} {text}", flush=True)
        return seconds

    def value(self, name: str, measure: Callable[[], float], *, at_most: float | None = None) -> None:
        """Print the number that `measure` returns, and whether it is at most `at_most`."""
        value = self._try(name, measure)
        if value is not None:
            result = "" if at_most is None else verdict(value, at_most=at_most)
            print(f"{name:58} {value:12.4g}     {result}", flush=True)

    def kernels(self, name: str, measure: Callable[[], list[KernelTime]], *, repeats: int = 1) -> None:
        """Print the kernels with the longest total times, and the sum of all kernel times. `measure` measures
        `repeats` repetitions. The printed times (in milliseconds) and numbers of launches are per repetition.
        Without a GPU, print nothing."""

        def total_s() -> float:
            times = measure()
            for kernel in times[:MAX_KERNELS]:
                count, per_repeat_ms = kernel.count / repeats, 1e3 * kernel.total_s / repeats
                print(f"  {kernel.name[:54]:56} {per_repeat_ms:12,.3f} ms  {count:8.1f} launches")
            return sum(kernel.total_s for kernel in times) / repeats

        if on_gpu():
            self.time(f"{name}, sum of all kernels", total_s)

    @property
    def is_over(self) -> bool:
        """Whether `time_limit_s` has passed."""
        return time.perf_counter() - self._started_at > self.config.time_limit_s

    def _try(self, name: str, measure: Callable[[], float]) -> float | None:
        if self.is_over:
            return None
        try:
            return measure()
        except Exception as error:
            self.num_failed += 1
            reason = (str(error).splitlines() or [""])[0]
            print(f"{name:58} FAILED: {type(error).__name__}: {reason}", flush=True)
            return None

    def median_s(self, run: Callable[[], object]) -> float:
        """Return the median duration of a call of `run`, in seconds. The first call compiles programs and is
        not measured."""
        run()
        return median(timed(run)().wall_s for _ in range(self.config.repeats))
