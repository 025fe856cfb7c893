"""Compare the generation times of our engine and of other programs with SmolLM2-135M, for 4, 8, 16 and 32
sequences. Our engine has 32 slots.

    scripts/setup.sh smollm2
    taskset -c 0,1 python -m scripts.bench.pretrained hf=PYTHON

The prompts have 64 tokens and are new in every measured call. Each measured call generates 128 tokens per
sequence. The measured calls begin when all decode programs are compiled.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

import chz

from scripts.bench.compare import (
    Measurement,
    PeerOptions,
    Side,
    interleave,
    peers,
    print_figure,
    random_sequences,
    report,
    side,
)
from skyrl_tx_server.files.model_source import converted_directory

PROMPT, NEW, SLOTS, CONTEXT = 64, 128, 32, 1024
COUNTS = (4, 8, 16, 32)
VOCABULARY = 49_152
WARM_UPS = 3  # calls per number of sequences, after which the decode program for this number is compiled


def main(config: PeerOptions) -> None:
    model_dir = converted_directory("smollm2-135m")
    options = (f"max_num_seqs={SLOTS}", f"max_context_length={CONTEXT}", "train_tokens_per_batch=1024")
    wall_s: dict[int, float] = {}
    with side("ours", "ours", model_dir, *options) as ours, peers(config, model_dir) as others:
        warm_up_seeds = itertools.count(1000)
        for count in COUNTS:
            for _ in range(WARM_UPS):
                generation(ours, count, warm_up_seeds)()
                ours.call("wait_for_compilations")
        seeds = {program.name: itertools.count() for program in (ours, *others.values())}
        for count in COUNTS:
            calls = {
                program.name: generation(program, count, seeds[program.name])
                for program in (ours, *others.values())
            }
            timings = interleave(calls, repeats=config.repeats)
            report(
                f"{count} sequences of {PROMPT} + {NEW} tokens",
                timings,
                {"HF": 1.5} if count in (8, 32) else {},
            )
            wall_s[count] = timings["ours"].wall_s
    for count in COUNTS:
        print_figure(f"steps/s with {count} sequences", NEW / wall_s[count])
    print_figure("time of 8 sequences / time of 32", wall_s[8] / wall_s[32], at_most=0.45)


def generation(program: Side, count: int, seeds: itertools.count[int]) -> Callable[[], Measurement]:
    """Return a function that generates completions of `count` new prompts."""

    def call() -> Measurement:
        prompts: Sequence[Sequence[int]] = random_sequences(
            [PROMPT] * count, seed=next(seeds), vocabulary=VOCABULARY
        )
        return program.call("sample", prompts=prompts, max_tokens=NEW)

    return call


if __name__ == "__main__":
    main(chz.entrypoint(PeerOptions, argv=sys.argv[1:], allow_hyphens=True))
