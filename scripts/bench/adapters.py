"""Measure the cost of many LoRA adapters of one base model. Training and optimizer steps of 32 models, each
of which is an adapter with its optimizer state, are compared with those of one model. Decode batches with 4
adapters are compared with decode batches with one adapter.

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

from scripts.bench.compare import (
    Measurement,
    ModelOptions,
    interleave,
    print_figure,
    random_sequences,
    report,
    timed,
)
from scripts.bench.sides.ours import LORA, Ours, datum, running
from scripts.bench.small_model import make_model
from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    ForwardBackward,
    LossFn,
    Op,
    OptimStep,
    SaveSampler,
)

MODELS, ACTIVE, NUM_SEQUENCES, PROMPT, NEW = 32, 4, 16, 128, 128


def main(config: ModelOptions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory) / "model", layers=config.layers)
        training(config, model_dir)
        decoding(config, model_dir)


def training(config: ModelOptions, model_dir: Path) -> None:
    """Compare an engine that has 32 models with an engine that has one model. In the engine with 32 models,
    consecutive measured calls use different models."""
    data = tuple(map(datum, random_sequences([513] * 4)))
    started = partial(running, model_dir, max_context_length=512, train_tokens_per_batch=2048)
    with started(max_models=1) as single, started(max_models=MODELS) as several:
        names = ["model", *(f"model-{number}" for number in range(1, MODELS))]
        for name in names[1:]:
            several.engine.submit(CreateModel(model_id=name, lora=LORA)).result()
        sides = {
            f"{MODELS} models": (several, itertools.cycle(names)),
            "one": (single, itertools.repeat("model")),
        }

        def compare(
            title: str, label: str, op: Callable[[str], Op], *, repeats: int, between_s: float
        ) -> None:
            calls = {
                side: timed(lambda ours=ours, models=models: ours.engine.submit(op(next(models))).result())
                for side, (ours, models) in sides.items()
            }
            timings = interleave(calls, repeats=repeats, between_s=between_s)
            report(title, timings, {}, baseline="one")
            print_figure(label, timings[f"{MODELS} models"].wall_s / timings["one"].wall_s, at_most=1.05)

        compare(
            f"forward_backward 4 x 512, {MODELS} models in training",
            f"{MODELS} adapters against 1",
            lambda model: ForwardBackward(model_id=model, data=data, loss_fn=LossFn.CROSS_ENTROPY),
            repeats=config.repeats,
            between_s=0.3,
        )
        compare(
            "optimizer step",
            f"optimizer step with {MODELS} models against 1",
            lambda model: OptimStep(model_id=model, adam=AdamSettings()),
            repeats=2 * MODELS,
            between_s=0.02,
        )


def decoding(config: ModelOptions, model_dir: Path) -> None:
    with running(model_dir) as ours:
        names = [f"adapter-{number}" for number in range(ACTIVE)]
        for name in names:
            ours.engine.submit(SaveSampler(model_id="model", weights=name)).result()
        calls = {f"{ACTIVE} adapters": sampling(ours, names), "one": sampling(ours, names[:1])}
        timings = interleave(calls, repeats=config.repeats)
        report(f"decoding {NUM_SEQUENCES} sequences with {ACTIVE} adapters", timings, {}, baseline="one")
        ratio = timings[f"{ACTIVE} adapters"].wall_s / timings["one"].wall_s
        print_figure(f"{ACTIVE} active adapters against 1", ratio, at_most=1.25)


def sampling(ours: Ours, names: Sequence[str]) -> Callable[[], Measurement]:
    seeds = itertools.count()

    def call() -> Measurement:
        prompts = random_sequences([PROMPT] * NUM_SEQUENCES, seed=next(seeds))
        weights = [names[index % len(names)] for index in range(NUM_SEQUENCES)]
        return timed(partial(ours.sample_each, prompts, [NEW] * NUM_SEQUENCES, weights=weights))()

    return call


if __name__ == "__main__":
    main(chz.entrypoint(ModelOptions, argv=sys.argv[1:], allow_hyphens=True))
