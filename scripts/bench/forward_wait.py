"""Measure how long a forward pass waits during a long generation, and how much forward passes slow the
generation.

    taskset -c 0,1 python -m scripts.bench.forward_wait

The engine samples 512 tokens for each of 16 sequences. Meanwhile, the script requests short forward passes
one after another and waits PAUSE_S seconds before each of them.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import chz
import numpy as np

from scripts.bench.compare import (
    Measurement,
    ModelOptions,
    interleave,
    print_figure,
    random_sequences,
    report,
    timed,
)
from scripts.bench.sides.ours import Ours, datum, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.engine.operations import ForwardBackward, LossFn, Sample, SamplingSettings

NUM_SEQUENCES, NEW, STEPS_PER_DISPATCH, PAUSE_S = 16, 512, 16, 2.0


def main(config: ModelOptions) -> None:
    seeds = itertools.count()
    waits: list[float] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        running(
            make_model(Path(directory) / "model", layers=config.layers),
            decode_steps_per_dispatch=STEPS_PER_DISPATCH,
        ) as ours,
    ):
        forward(ours)
        alone_s = median(timed(partial(forward, ours))().wall_s for _ in range(3))

        def with_forwards() -> Measurement:
            return timed(lambda: generate(ours, seed=next(seeds), waits=waits))()

        timings = interleave(
            {
                "alone": lambda: timed(lambda: generate(ours, seed=next(seeds)))(),
                "with forwards": with_forwards,
            },
            repeats=config.repeats,
        )
        report(
            f"generation {NUM_SEQUENCES} x {NEW} with a forward pass every {PAUSE_S:g} s",
            timings,
            {},
            baseline="alone",
        )
        slowed = timings["with forwards"].wall_s / timings["alone"].wall_s
        print_figure("generation with forwards, relative to generation alone", slowed, at_most=1.1)
        dispatch_s = timings["alone"].wall_s / (NEW / STEPS_PER_DISPATCH)
        additional_wait_s = median(waits) - alone_s
        print_figure("a decode dispatch, s", dispatch_s)
        print_figure("forward alone, s", alone_s)
        print_figure("additional wait, s", additional_wait_s)
        print_figure("additional wait, in dispatches", additional_wait_s / dispatch_s, at_most=1.0)


def generate(ours: Ours, *, seed: int, waits: list[float] | None = None) -> None:
    """Sample all sequences.

    If `waits` is given, request forward passes during the generation and append the seconds that each takes,
    its wait included, to `waits`.
    """
    prompts = random_sequences([64] * NUM_SEQUENCES, seed=seed)
    settings = [
        SamplingSettings(max_tokens=NEW, seed=index, stop_at_eos=False) for index in range(NUM_SEQUENCES)
    ]

    futures = [
        ours.engine.submit(Sample(weights=ours.weights, prompt=np.array(prompt, np.int32), settings=chosen))
        for prompt, chosen in zip(prompts, settings, strict=True)
    ]
    while waits is not None and not all(future.done() for future in futures):
        time.sleep(PAUSE_S)
        if ours.stat("slots_used"):
            waits.append(timed(partial(forward, ours))().wall_s)
    for future in futures:
        future.result()


def forward(ours: Ours) -> None:
    data = (datum(random_sequences([65])[0]),)
    ours.engine.submit(
        ForwardBackward(model_id="model", data=data, loss_fn=LossFn.CROSS_ENTROPY, forward_only=True)
    ).result()


if __name__ == "__main__":
    main(chz.entrypoint(ModelOptions, argv=sys.argv[1:], allow_hyphens=True))
