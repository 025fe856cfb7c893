"""What many adapters cost: 32 models in training against one, 4 active adapters in a decode batch against one, an optimizer step.

taskset -c 0,1 python -m scripts.bench.adapters
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import chz

from scripts.bench.compare import Peers, Took, figure, interleave, random_sequences, report, timed
from scripts.bench.sides.ours import LORA, Ours, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.ops import CreateModel, SaveSampler

MODELS, ACTIVE, ROWS, PROMPT, NEW = 32, 4, 16, 128, 128


def main(config: Peers) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", layers=config.layers)
        training(config, model_dir)
        decoding(config, model_dir)


def training(config: Peers, model_dir: Path) -> None:
    sequences = random_sequences([513] * 4)
    started = partial(running, model_dir, max_context_length=512, train_tokens_per_batch=2048)
    with started(max_models=1) as one, started(max_models=MODELS) as many:
        for number in range(1, MODELS):
            many.engine.submit(CreateModel(model_id=f"model-{number}", lora=LORA)).result()
        turns = {f"{MODELS} models": timed(partial(many.train, sequences)), "one": timed(partial(one.train, sequences))}
        timings = interleave(turns, repeats=config.repeats)
        report(f"forward_backward 4 x 512 with {MODELS} models in training", timings, {}, of="one")
        ratio = timings[f"{MODELS} models"].wall_s / timings["one"].wall_s
        figure(f"{MODELS} adapters against 1", ratio, at_most=1.05)
        turns = {f"{MODELS} models": timed(many.optim_step), "one": timed(one.optim_step)}
        report("optimizer step", interleave(turns, repeats=max(5, config.repeats), between_s=0.05), {}, of="one")


def decoding(config: Peers, model_dir: Path) -> None:
    with running(model_dir) as ours:
        names = [f"adapter-{number}" for number in range(ACTIVE)]
        for name in names:
            ours.engine.submit(SaveSampler(model_id="model", name=None, weights=name)).result()
        turns = {f"{ACTIVE} adapters": sampling(ours, names), "one": sampling(ours, names[:1])}
        timings = interleave(turns, repeats=config.repeats)
        report(f"decoding {ROWS} rows with {ACTIVE} adapters", timings, {}, of="one")
        ratio = timings[f"{ACTIVE} adapters"].wall_s / timings["one"].wall_s
        figure(f"{ACTIVE} active adapters against 1", ratio, at_most=1.25)


def sampling(ours: Ours, names: Sequence[str]) -> Callable[[], Took]:
    seeds = itertools.count()

    def turn() -> Took:
        prompts = random_sequences([PROMPT] * ROWS, seed=next(seeds))
        weights = [names[row % len(names)] for row in range(ROWS)]
        return timed(partial(ours.sample_each, prompts, [NEW] * ROWS, weights=weights))()

    return turn


if __name__ == "__main__":
    main(chz.entrypoint(Peers, argv=sys.argv[1:], allow_hyphens=True))
