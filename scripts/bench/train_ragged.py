"""Measure forward_backward of 32 sequences of different lengths: our engine packs them, and SkyRL's tx pads
them.

    taskset -c 0,1 python -m scripts.bench.train_ragged tx=PYTHON

The lengths are lognormal with a mean of 286 tokens and a maximum of 1,025 tokens. In the case `one bucket`
our engine gets sequences that are all padded to 1,025 tokens.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import chz
import numpy as np

from scripts.bench.compare import (
    ComparisonOptions,
    interleave,
    peers,
    print_figure,
    random_sequences,
    report,
    side,
)
from scripts.bench.sides.ours import datum
from scripts.bench.small_model import make_model
from skyrl_tx_server.model.shapes import train_shapes
from skyrl_tx_server.training.packing import pack

LONGEST = 1025


def main(config: ComparisonOptions) -> None:
    sequences = random_sequences(ragged_lengths())
    padded = [sequence + [0] * (LONGEST - len(sequence)) for sequence in sequences]
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        with (
            side("ours", "ours", model_dir) as ours,
            peers(config, model_dir, tx_micro_batch_size=8) as others,
        ):
            calls = {
                "ours": partial(ours.call, "train", sequences=sequences),
                "one bucket": partial(ours.call, "train", sequences=padded),
            }
            if "skyrl-tx" in others:
                calls["skyrl-tx"] = partial(others["skyrl-tx"].call, "train", sequences=sequences)
            targets = {"one bucket": 2.5, "skyrl-tx": 5.0}
            report(
                "forward_backward, 32 ragged sequences", interleave(calls, repeats=config.repeats), targets
            )
    data = [datum(sequence) for sequence in sequences]
    trained = [np.ones(len(item.tokens), bool) for item in data]
    batches = pack(data, trained, train_shapes(max_context_length=2048, tokens_per_batch=8192))
    useful, positions = (
        sum(len(sequence) - 1 for sequence in sequences),
        sum(batch.arrays.tokens.size for batch in batches),
    )
    shapes = ", ".join("x".join(map(str, batch.arrays.tokens.shape)) for batch in batches)
    print_figure(f"fill of packed streams, batches {shapes}", useful / positions, at_least=0.85)


def ragged_lengths(*, seed: int = 0) -> list[int]:
    """Return 32 lognormal lengths between 32 and 1,025 tokens. The first length is 1,025. All lengths are
    drawn again until their mean differs from 286 by less than 1."""
    random = np.random.default_rng(seed)
    while True:
        drawn = np.clip(random.lognormal(5.35, 0.8, 32).astype(int), 32, LONGEST)
        drawn[0] = LONGEST
        if abs(drawn.mean() - 286) < 1:
            return drawn.tolist()


if __name__ == "__main__":
    main(chz.entrypoint(ComparisonOptions, argv=sys.argv[1:], allow_hyphens=True))
