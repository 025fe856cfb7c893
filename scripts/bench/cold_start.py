"""Measure the time from the start of a server to its first answers, with an empty and with a filled
compilation cache.

    python -m scripts.bench.cold_start [base_model=smollm2-135m] [tokens=32] [max_num_seqs=64]

The first request samples one token. The second request and ANSWERS further requests sample `tokens` tokens
each. The server first decodes with a program that has a loop over the layers (rolled), because this program
compiles fast. The requests become faster when the program without this loop (unrolled) is compiled. The
longest silence is the longest interval without a line in the server's log, from the start of the server to
the second answer.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import chz
import tinker
from tinker import types

from scripts.bench.compare import print_figure

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = 12  # number of requests after the first two


@chz.chz
class ColdStart:
    base_model: str = "smollm2-135m"
    tokens: int = 32
    max_num_seqs: int = 64


@dataclass(kw_only=True, slots=True)
class Log:
    """The times of the lines of a server's log, by the monotonic clock."""

    times: list[float] = field(default_factory=list)

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.times.append(time.monotonic())
            print(f"  {line}", end="", file=sys.stderr)

    def longest_silence(self, start: float, end: float) -> float:
        """Return the longest interval without a line between `start` and `end`, in seconds."""
        times = [start, *(at for at in self.times if start < at < end), end]
        return max(after - before for before, after in itertools.pairwise(times))


def main(config: ColdStart) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, first_at_most in (("empty cache", 12.0), ("filled cache", 4.0)):
            measure(config, Path(directory), name, first_at_most=first_at_most)


def measure(config: ColdStart, directory: Path, name: str, *, first_at_most: float) -> None:
    start, log = time.monotonic(), Log()
    command = [
        *(sys.executable, "-m", "skyrl_tx_server", "port=0", f"base_model={config.base_model}"),
        f"max_num_seqs={config.max_num_seqs}",
        f"checkpoints_dir={directory}/checkpoints",
        f"compilation_cache_dir={directory}/cache",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        reader = threading.Thread(target=log.read, args=(server,), daemon=True)
        reader.start()
        ready = server.stdout.readline().split()
        print_figure(f"{name}: server ready, s", time.monotonic() - start)
        service = tinker.ServiceClient(base_url=ready[3], api_key="tml-dummy")
        model = service.get_server_capabilities().supported_models[0].model_name
        sampler = service.create_sampling_client(base_model=model)
        times = []
        for seed in range(2 + ANSWERS):
            began = time.monotonic()
            sampler.sample(
                prompt=types.ModelInput.from_ints(list(range(100, 164))),
                num_samples=1,
                sampling_params=types.SamplingParams(max_tokens=config.tokens if seed else 1, seed=seed),
            ).result(timeout=600)
            end = time.monotonic()
            times.append(end - began)
            if seed == 0:
                print_figure(f"{name}: first token, s", end - start, at_most=first_at_most)
            if seed == 1:
                print_figure(f"{name}: first {config.tokens} tokens, s", end - start)
                print_figure(f"{name}: longest silence, s", log.longest_silence(start, end), at_most=3.0)
        print(f"{name}: seconds of each further answer:", *(f"{seconds:.2f}" for seconds in times[2:]))
        server.terminate()
        reader.join()  # before the pipe is closed


if __name__ == "__main__":
    main(chz.entrypoint(ColdStart))
