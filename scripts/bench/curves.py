"""Measure how the cost of training and sampling grows with context, prompt length, batch, adapters, turns and
group size, and fit the order of growth.

    taskset -c 0,1 python -m scripts.bench.curves [only=context,batch]

The order is the slope of log(CPU seconds) over log(size). An order of 1 is linear growth. The fit uses CPU
seconds, because the load of other processes hardly changes them. It uses only the sizes from the lower median
upwards, where the constant cost of a call is small.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import chz
import numpy as np

from scripts.bench.compare import Timing, interleave, random_sequences, timed
from scripts.bench.sides.ours import LORA, Ours, running
from scripts.bench.small_model import make_model
from scripts.bench.train_group import make_group
from skyrl_tx_server.engine.operations import CreateModel

NEW = 32  # sampled tokens per sequence in the curve of generation


@chz.chz
class CurvesConfig:
    only: str = chz.field(
        default="context,prefill,batch,adapters,turns,group", doc="Curves to measure, separated by commas"
    )
    layers: int = 8
    repeats: int = 2


def main(config: CurvesConfig) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        for name in config.only.split(","):
            CURVES[name](config, model_dir)


def context(config: CurvesConfig, model_dir: Path) -> None:
    """Train one sequence of each length. Attention is quadratic, and everything else is linear."""
    lengths = [512, 1024, 2048, 4096, 8192]
    with running(model_dir, max_context_length=8192, max_num_seqs=1, train_tokens_per_batch=512) as ours:
        runs = {length: partial(ours.train, random_sequences([length])) for length in lengths}
        curve("training, tokens of one sequence", runs, config)


def prefill(config: CurvesConfig, model_dir: Path) -> None:
    """Prefill one prompt of each length."""
    lengths = [512, 1024, 2048, 4096, 8000]
    with running(model_dir, max_context_length=8192, max_num_seqs=1) as ours:
        curve(
            "prefill, tokens of one prompt", {length: fresh(ours, [length], 1) for length in lengths}, config
        )


def batch(config: CurvesConfig, model_dir: Path) -> None:
    """Sample and train batches of each size."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    with running(model_dir, max_context_length=512, max_num_seqs=64) as ours:
        curve(
            f"generation, sequences of 64 + {NEW} tokens in 64 slots",
            {count: fresh(ours, [64] * count, NEW) for count in sizes},
            config,
        )
        runs = {count: partial(ours.train, random_sequences([129] * count)) for count in sizes}
        curve("training, sequences of 128 tokens", runs, config)


def adapters(config: CurvesConfig, model_dir: Path) -> None:
    """Train one model while up to 32 models are loaded for training."""
    timings = {}
    with running(
        model_dir, max_models=32, max_context_length=256, train_tokens_per_batch=256, max_num_seqs=1
    ) as ours:
        for count in (1, 2, 4, 8, 16, 32):
            for number in range(count // 2, count if count > 1 else 0):  # `running` has created one model
                ours.engine.submit(CreateModel(model_id=f"model-{number}", lora=LORA)).result()
            run = timed(partial(ours.train, random_sequences([257])))
            timings |= interleave({str(count): run}, repeats=config.repeats, between_s=0.0)
    show("training one of several models", timings)


def turns(config: CurvesConfig, model_dir: Path) -> None:
    """Roll out four trajectories whose turns have 16 observed and 16 sampled tokens."""
    seeds = itertools.count()

    def roll_out(ours: Ours, count: int) -> None:
        tokens = random_sequences([128] * 4, seed=next(seeds))
        for _ in range(count):
            tokens = [
                context + new
                for context, new in zip(tokens, random_sequences([16] * 4, seed=next(seeds)), strict=True)
            ]
            tokens = [context + new for context, new in zip(tokens, ours.sample(tokens, 16), strict=True)]

    with running(model_dir, max_context_length=2048, max_num_seqs=4) as ours:
        curve(
            "turns of a trajectory",
            {count: partial(roll_out, ours, count) for count in (1, 2, 5, 10, 25, 50)},
            config,
        )


def group(config: CurvesConfig, model_dir: Path) -> None:
    """Sample and train groups with a prompt of 512 tokens and responses of 64."""
    sizes = [1, 2, 4, 8, 16, 32]
    with running(model_dir, max_context_length=1024, max_num_seqs=32) as ours:
        curve(
            "sampling, members of a group",
            {size: fresh(ours, [512], 64, num_samples=size) for size in sizes},
            config,
        )
        runs = {size: partial(ours.train, make_group(size, response=64)) for size in sizes}
        curve("training, members of a group", runs, config)


CURVES = {
    "context": context,
    "prefill": prefill,
    "batch": batch,
    "adapters": adapters,
    "turns": turns,
    "group": group,
}


def fresh(
    ours: Ours, lengths: Sequence[int], new_tokens: int, *, num_samples: int = 1
) -> Callable[[], object]:
    """Return a function that samples from new random prompts at each call."""
    seeds = itertools.count()
    return lambda: ours.sample(
        random_sequences(lengths, seed=next(seeds)), new_tokens, num_samples=num_samples
    )


def curve(title: str, runs: Mapping[int, Callable[[], object]], config: CurvesConfig) -> None:
    show(
        title,
        interleave(
            {str(size): timed(run) for size, run in runs.items()}, repeats=config.repeats, between_s=0.0
        ),
    )


def show(title: str, timings: Mapping[str, Timing]) -> None:
    print(f"{title}: order {order(timings):.2f}")
    for size, timing in timings.items():
        print(f"  {size:>6}  {timing.wall_s:8.3f} s  CPU {timing.cpu_s:8.3f} s", flush=True)


def order(timings: Mapping[str, Timing]) -> float:
    """Return the slope of log(CPU seconds) over log(size) for the sizes from the lower median upwards."""
    upper = list(timings.items())[(len(timings) - 1) // 2 :]
    return float(
        np.polyfit(
            np.log([int(size) for size, _ in upper]), np.log([timing.cpu_s for _, timing in upper]), 1
        )[0]
    )


if __name__ == "__main__":
    main(chz.entrypoint(CurvesConfig, argv=sys.argv[1:], allow_hyphens=True))
