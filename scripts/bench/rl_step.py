"""Compare a complete RL step with other programs: 2 groups of 8, prompts of 512 tokens, 3 turns of 48
observed and 32 sampled tokens, and one update.

    taskset -c 0,1 python -m scripts.bench.rl_step hf=PYTHON tx=PYTHON
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import chz

from scripts.bench.compare import Measurement, Peers, Side, interleave, peers, random_sequences, report, side
from scripts.bench.small_model import make_model

GROUPS, GROUP, PROMPT, TURNS, OBSERVED, NEW = 2, 8, 512, 3, 48, 32


def main(config: Peers) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = make_model(Path(folder) / "model", layers=config.layers)
        with (
            side("ours", "ours", model_dir) as ours,
            peers(config, model_dir, tx_micro_batch_size=8) as others,
        ):
            turns = {program.name: steps(program) for program in (ours, *others.values())}
            title = f"one RL step, {GROUPS} groups of {GROUP}, {TURNS} turns"
            report(title, interleave(turns, repeats=config.repeats), {"HF": 4.0, "skyrl-tx": 5.0})


def steps(program: Side) -> Callable[[], Measurement]:
    """Return a function that runs one RL step on new prompts, sampled with the weights of the previous
    step."""
    seeds = itertools.count()

    def step() -> Measurement:
        seed = 100 * next(seeds)
        calls = []
        trajectories = [
            prompt for prompt in random_sequences([PROMPT] * GROUPS, seed=seed) for _ in range(GROUP)
        ]
        for turn in range(TURNS):
            observed = random_sequences([OBSERVED] * len(trajectories), seed=seed + 1 + turn)
            trajectories = [trajectory + new for trajectory, new in zip(trajectories, observed, strict=True)]
            calls.append(program.call("sample", prompts=trajectories, max_tokens=NEW))
            completions = calls[-1].result
            assert isinstance(completions, list)
            trajectories = [
                trajectory + new for trajectory, new in zip(trajectories, completions, strict=True)
            ]
        calls += [
            program.call("train", sequences=trajectories),
            program.call("optim_step"),
            program.call("save"),
        ]
        return Measurement(wall_s=sum(call.wall_s for call in calls), cpu_s=sum(call.cpu_s for call in calls))

    return step


if __name__ == "__main__":
    main(chz.entrypoint(Peers, argv=sys.argv[1:], allow_hyphens=True))
