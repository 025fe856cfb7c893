"""Measure continuous batching: 64 ragged requests in 16 slots.

    taskset -c 0,1 python -m scripts.bench.continuous tx=PYTHON

PYTHON is a Python in which SkyRL's tx is installed (`PeerOptions`). A slot is the place of one sequence in
the decode batch. The requests differ in prompt length and in the number of new tokens. Our engine gets all 64
requests in one call (`ours`). For comparison, our engine (`static`) and the JAX backend of SkyRL's tx
(`skyrl-tx`) get 16 requests at a time, and each of these batches waits for its longest sequence. The
benchmark also compares the number of decode steps of `ours` with that of `static`. Unlike a duration, this
number does not depend on the load of the machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import chz
import numpy as np

from scripts.bench.compare import (
    ComparisonOptions,
    Measurement,
    Side,
    interleave,
    peers,
    print_figure,
    random_sequences,
    report,
    side,
)
from scripts.bench.small_model import make_model

REQUESTS, SLOTS, STEPS_PER_DISPATCH = 64, 16, 16


def main(config: ComparisonOptions) -> None:
    if config.hf is not None:
        sys.exit("continuous: hf= is not supported; remove it")
    random = np.random.default_rng(5)
    prompt_lengths = random.integers(48, 257, REQUESTS).tolist()
    limits = np.clip(random.lognormal(3.9, 0.8, REQUESTS).astype(int), 8, 256).tolist()
    seeds = iter(range(10**6))
    steps: dict[str, int] = {}

    def run(program: Side, *, batch_size: int) -> Measurement:
        # The prompts are new in every run, so that the prefix cache has no effect.
        prompts = random_sequences(prompt_lengths, seed=next(seeds))
        wall_s = cpu_s = 0.0
        for first in range(0, REQUESTS, batch_size):
            part = slice(first, first + batch_size)
            measured = program.call("sample", prompts=prompts[part], max_tokens=limits[part])
            wall_s, cpu_s = wall_s + measured.wall_s, cpu_s + measured.cpu_s
        return Measurement(wall_s=wall_s, cpu_s=cpu_s)

    def counted(name: str, program: Side, *, batch_size: int) -> Measurement:
        before = program.call("stat", name="decode_dispatches").result
        measured = run(program, batch_size=batch_size)
        after = program.call("stat", name="decode_dispatches").result
        assert isinstance(before, int) and isinstance(after, int)
        steps[name] = (after - before) * STEPS_PER_DISPATCH
        return measured

    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        with (
            side(
                "ours",
                "ours",
                model_dir,
                f"max_num_seqs={SLOTS}",
                f"decode_steps_per_dispatch={STEPS_PER_DISPATCH}",
            ) as ours,
            peers(config, model_dir) as others,
        ):
            calls = {
                "ours": lambda: counted("ours", ours, batch_size=REQUESTS),
                "static": lambda: counted("static", ours, batch_size=SLOTS),
            }
            if "skyrl-tx" in others:
                calls["skyrl-tx"] = lambda: run(others["skyrl-tx"], batch_size=SLOTS)
            new_tokens = f"{np.mean(limits):.0f} new tokens on average, at most {max(limits)}"
            title = f"{REQUESTS} ragged requests in {SLOTS} slots, {new_tokens}"
            report(title, interleave(calls, repeats=config.repeats), {"skyrl-tx": 2.3})
    ratio = steps["ours"] / steps["static"]
    print_figure(f"decode steps {steps['ours']} against {steps['static']}", ratio, at_most=0.55)
    fewest = (sum(limits) - REQUESTS) / SLOTS  # prefill samples the first token of each request
    print_figure("fewest possible decode steps, with every slot always in use", fewest)


if __name__ == "__main__":
    main(chz.entrypoint(ComparisonOptions, argv=sys.argv[1:], allow_hyphens=True))
