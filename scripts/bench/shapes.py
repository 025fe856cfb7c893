"""Measure how many programs a mixed workload compiles, and the time that a warm start saves.

    taskset -c 0,1 python -m scripts.bench.shapes

A process with an empty compilation cache (cold) runs 200 requests (samples of random lengths and settings,
and forward and forward_backward of random lengths), and then 200 requests with other random values, which
must not compile any program. A second process does the same with the filled cache (warm).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import chz
import numpy as np

from scripts.bench.compare import ROOT, print_figure, random_sequences
from scripts.bench.sides.ours import Ours, datum, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.engine.operations import ForwardBackward, LossFn, Sample, SamplingSettings

REQUESTS, CONTEXT = 200, 2048


@chz.chz
class ShapesConfig:
    child: str | None = chz.field(
        default=None,
        doc="A model directory. If given, this process runs the measurement and prints one JSON object",
    )
    cache: str | None = chz.field(default=None, doc="Compilation cache of the measured process")
    layers: int = chz.field(
        default=8,
        doc="Layers of the model; from 8 on, decode programs with a loop over the layers are also compiled",
    )


def main(config: ShapesConfig) -> None:
    if config.child is not None:
        print(json.dumps(measure_programs(Path(config.child), config.cache)))
        return
    with tempfile.TemporaryDirectory() as directory:
        model_dir, cache = (
            make_model(Path(directory) / "model", layers=config.layers),
            Path(directory) / "xla",
        )
        cold, warm = (run_measurement(model_dir, cache) for _ in range(2))
        print(f"{REQUESTS} random requests, context {CONTEXT}, {config.layers} layers")
        names = ", ".join(f"{name} {count}" for name, count in cold["programs"].items())
        print_figure(f"programs: {names}", sum(cold["programs"].values()), at_most=12)
        print_figure(f"programs compiled by {REQUESTS} further requests", cold["later"], at_most=0)
        print_figure("seconds of compilation, cold", sum(cold["seconds"].values()))
        ratio = sum(warm["seconds"].values()) / sum(cold["seconds"].values())
        print_figure(f"warm / cold ({warm['hits']} programs from the cache)", ratio, at_most=0.15)
        print_figure("first token after a warm restart, s", warm["first_token_s"], at_most=3.0)
        print_figure("first token after a cold start, s", cold["first_token_s"])


def run_measurement(model_dir: Path, cache: Path) -> dict:
    command = [sys.executable, "-m", "scripts.bench.shapes", f"child={model_dir}", f"cache={cache}"]
    return json.loads(
        subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[
            -1
        ]
    )


def measure_programs(model_dir: Path, cache: str | None) -> dict:
    start = time.perf_counter()  # after the import of jax, which takes about one second
    with running(
        model_dir, compilation_cache_dir=None if cache is None else Path(cache), max_context_length=CONTEXT
    ) as ours:
        ours.sample(random_sequences([64]), 1)
        first_token_s = time.perf_counter() - start
        run_requests(ours, seed=0)
        stats, programs = ours.engine.stats(), ours.num_programs()
        run_requests(ours, seed=1)
        return {
            "programs": stats["programs"],
            "seconds": stats["program_seconds"],
            "hits": stats["programs_from_cache"],
            "later": ours.num_programs() - programs,
            "first_token_s": first_token_s,
        }


def run_requests(ours: Ours, *, seed: int) -> None:
    """Run REQUESTS requests, eight at a time. Half of them are samples, a quarter are forward passes, and a
    quarter are forward_backward passes. Then take an optimizer step and save a sampler snapshot."""
    random = np.random.default_rng(seed)
    pending = []
    for number in range(REQUESTS):
        length = int(np.exp(random.uniform(np.log(8), np.log(CONTEXT - 80))))
        tokens = random_sequences([length + 1], seed=REQUESTS * seed + number)[0]
        if number % 2:
            settings = SamplingSettings(
                max_tokens=int(random.integers(1, 64)),
                temperature=float(random.choice([0.0, 0.7, 1.0])),
                top_p=float(random.choice([0.9, 1.0])),
                top_k=int(random.choice([-1, 20])),
                seed=number,
            )
            op = Sample(
                weights=[None, ours.weights][number % 4 == 1],
                prompt=np.array(tokens, np.int32),
                settings=settings,
                num_samples=int(random.integers(1, 9)),
                prompt_logprobs=bool(random.integers(0, 2)),
            )
        else:
            data = tuple(
                datum(tokens[: int(random.integers(2, length + 2))]) for _ in range(random.integers(1, 5))
            )
            op = ForwardBackward(
                model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY, forward_only=number % 4 == 2
            )
        pending.append(ours.engine.submit(op))
        if len(pending) == 8:
            for future in pending:
                future.result()
            pending.clear()
    ours.optim_step()
    ours.save()


if __name__ == "__main__":
    main(chz.entrypoint(ShapesConfig, argv=sys.argv[1:], allow_hyphens=True))
