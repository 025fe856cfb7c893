"""Compare the generation times of our engine and of other programs, for 16 prompts with one sample each and
for one prompt with 16 samples. A prompt has 256 tokens, and a sample has 128 tokens.

    taskset -c 0,1 python -m scripts.bench.generate hf=PYTHON tx=PYTHON

Every measured call has new prompts, so that the prefix cache of a program has no effect. At the end, the
script checks that sample i of a prompt does not depend on the number of samples.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import chz

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

PROMPT, NEW, NUM_SEQUENCES = 256, 128, 16


def main(config: ComparisonOptions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        with (
            side("ours", "ours", model_dir) as ours,
            peers(config, model_dir) as others,
        ):
            sides = [ours, *others.values()]
            calls = {
                program.name: new_generations(program, prompts=NUM_SEQUENCES, num_samples=1)
                for program in sides
            }
            title = f"generation, {NUM_SEQUENCES} x ({PROMPT} + {NEW}), different prompts"
            report(title, interleave(calls, repeats=config.repeats), {"HF": 2.3, "skyrl-tx": 1.4})
            calls = {
                program.name: new_generations(program, prompts=1, num_samples=NUM_SEQUENCES, first_seed=1_000)
                for program in sides
            }
            calls["ours, 16 prompts"] = new_generations(
                ours, prompts=NUM_SEQUENCES, num_samples=1, first_seed=2_000
            )
            report(
                f"one prompt, {NUM_SEQUENCES} samples",
                interleave(calls, repeats=config.repeats),
                {"HF": 3.6, "skyrl-tx": 2.4},
            )
            print_figure("sample i is the same in a group of 1, 4, 16", str(same_in_every_group(ours)))


def new_generations(
    program: Side, *, prompts: int, num_samples: int, first_seed: int = 0
) -> Callable[[], Measurement]:
    """Return a function that samples completions of new prompts in each call. The first call draws its
    prompts with the seed `first_seed`, and each further call with the next seed."""
    seeds = itertools.count(first_seed)

    def call() -> Measurement:
        chosen = random_sequences([PROMPT] * prompts, seed=next(seeds))
        return program.call("sample", prompts=chosen, max_tokens=NEW, num_samples=num_samples)

    return call


def same_in_every_group(ours: Side) -> bool:
    sample = partial(ours.call, "sample", prompts=random_sequences([PROMPT], seed=3_000), max_tokens=NEW)
    groups = [sample(num_samples=count).result for count in (1, 4, NUM_SEQUENCES)]
    assert all(isinstance(group, list) for group in groups)
    return all(group == groups[-1][: len(group)] for group in groups)  # type: ignore[index, arg-type]


if __name__ == "__main__":
    main(chz.entrypoint(ComparisonOptions, argv=sys.argv[1:], allow_hyphens=True))
