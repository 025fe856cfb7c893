"""Compare the time of forward_backward in our engine and in other programs, for 8 sequences with the same
length of 512 tokens.

Each program runs in two cases: the backward pass recomputes every layer, or it keeps the activations. In the
second case, our engine still recomputes the values that `Remat.ACTIVATIONS` lists, such as norms. Our engine
runs with `train_tokens_per_batch=8192`, and a second time with 4096.

    taskset -c 0,1 python -m scripts.bench.train_equal hf=PYTHON tx=PYTHON

PYTHON is the interpreter in which Hugging Face (`hf`) or SkyRL's tx (`tx`) is installed.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import chz

from scripts.bench.compare import ComparisonOptions, interleave, peers, random_sequences, report, side
from scripts.bench.small_model import make_model

# whether every layer is recomputed -> name of program -> minimum ratio of its time to our engine's time
TARGETS = {False: {"HF": 1.5, "skyrl-tx": 1.6}, True: {"HF": 1.9, "skyrl-tx": 1.6}}


def main(config: ComparisonOptions) -> None:
    sequences = random_sequences([513] * 8)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        for recompute in (False, True):
            options = f"recompute={str(recompute).lower()}"
            with (
                side("ours", "ours", model_dir, options) as ours,
                side(
                    "ours 4096 tokens", "ours", model_dir, options, "train_tokens_per_batch=4096"
                ) as ours_4096,
                peers(config, model_dir, recompute=recompute) as others,
            ):
                calls = {
                    program.name: partial(program.call, "train", sequences=sequences)
                    for program in (ours, ours_4096)
                }
                calls |= {
                    name: partial(other.call, "train", sequences=sequences) for name, other in others.items()
                }
                if "HF" in others:
                    calls["HF"] = partial(
                        others["HF"].call, "train", sequences=sequences, recompute=recompute
                    )
                title = f"forward_backward 8 x 512, {'every layer' if recompute else 'no layer'} recomputed"
                report(title, interleave(calls, repeats=config.repeats), TARGETS[recompute])


if __name__ == "__main__":
    main(chz.entrypoint(ComparisonOptions, argv=sys.argv[1:], allow_hyphens=True))
