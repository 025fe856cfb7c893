"""Compare the times that our engine and other programs take for a complete RL step and for each of its phases
(sampling, training, saving).

The step rolls out 2 groups of 8 trajectories and makes one update. A trajectory has a prompt of 512 tokens
and 3 turns, each with 48 observed and 32 sampled tokens.

    taskset -c 0,1 python -m scripts.bench.rl_step hf=PYTHON tx=PYTHON
    python -m scripts.bench.rl_step hf=PYTHON tx=PYTHON base_model=smollm2-135m micro_batch_size=2
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import chz

from scripts.bench.compare import (
    ComparisonOptions,
    Measurement,
    Side,
    interleave,
    peers,
    random_sequences,
    report,
    side,
)
from scripts.bench.small_model import make_model
from skyrl_tx_server.files.model_source import converted_directory

GROUPS, GROUP, PROMPT, TURNS, OBSERVED, NEW = 2, 8, 512, 3, 48, 32


type Phases = dict[str, list[float]]
"""Wall times in seconds of each phase, one per step. The time of the first step includes compilation."""


@chz.chz
class RlStep(ComparisonOptions):
    base_model: str | None = chz.field(
        default=None, doc="Packaged model, such as smollm2-135m. None: a random model with `layers` layers"
    )
    micro_batch_size: int = chz.field(
        default=8, doc="Sequences per micro-batch of the other programs; lower it if one runs out of memory"
    )


def main(config: RlStep) -> None:
    with tempfile.TemporaryDirectory() as directory:
        if config.base_model is None:
            model_dir, targets = make_model(Path(directory) / "model", layers=config.layers), (4.0, 5.0)
        else:
            model_dir, targets = converted_directory(config.base_model), (2.0, 2.0)
        with (
            side("ours", "ours", model_dir) as ours,
            peers(config, model_dir, tx_micro_batch_size=config.micro_batch_size) as others,
        ):
            sides = [ours, *others.values()]
            phases: dict[str, Phases] = {program.name: defaultdict(list) for program in sides}
            hf_options = {"micro_batch_size": config.micro_batch_size}
            calls = {
                program.name: steps(program, phases[program.name], hf_options if program.name == "HF" else {})
                for program in sides
            }
            title = f"one RL step, {GROUPS} groups of {GROUP}, {TURNS} turns"
            timings = interleave(calls, repeats=config.repeats)
            report(title, timings, dict(zip(("HF", "skyrl-tx"), targets, strict=True)))
            report_phases(phases)


def steps(program: Side, phases: Phases, train_options: Mapping[str, int]) -> Callable[[], Measurement]:
    """Return a function that runs one RL step on new prompts. It samples with the weights after the previous
    step and appends the time of each phase to `phases`. `train_options` are arguments of the program's
    `train` call besides the sequences."""
    seeds = itertools.count()

    def step() -> Measurement:
        seed = 100 * next(seeds)
        samples: list[Measurement] = []
        trajectories = [
            prompt for prompt in random_sequences([PROMPT] * GROUPS, seed=seed) for _ in range(GROUP)
        ]
        for turn in range(TURNS):
            observed = random_sequences([OBSERVED] * len(trajectories), seed=seed + 1 + turn)
            trajectories = [trajectory + new for trajectory, new in zip(trajectories, observed, strict=True)]
            samples.append(program.call("sample", prompts=trajectories, max_tokens=NEW))
            completions = samples[-1].result
            assert isinstance(completions, list)
            trajectories = [
                trajectory + new for trajectory, new in zip(trajectories, completions, strict=True)
            ]
        update = [program.call("train", sequences=trajectories, **train_options), program.call("optim_step")]
        save = [program.call("save")]
        for name, calls in (("sampling", samples), ("training", update), ("saving", save)):
            phases[name].append(sum(call.wall_s for call in calls))
        every = [*samples, *update, *save]
        return Measurement(wall_s=sum(call.wall_s for call in every), cpu_s=sum(call.cpu_s for call in every))

    return step


def report_phases(phases: dict[str, Phases], *, baseline: str = "ours") -> None:
    """Print one line per phase: the median time of each program over all steps except the first, and its
    ratio to that of `baseline`."""

    def middle(times: Sequence[float]) -> float:
        return median(times[1:])

    for phase, times in phases[baseline].items():
        parts = [f"{baseline} {middle(times):.3f} s"]
        for name in phases.keys() - {baseline}:
            other = middle(phases[name][phase])
            parts.append(f"{name} {other:.3f} s ({other / middle(times):.2f}x)")
        print(f"  {phase:10} {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main(chz.entrypoint(RlStep, argv=sys.argv[1:], allow_hyphens=True))
