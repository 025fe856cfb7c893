"""Tests that a run records each metric name of the seed documents (docs/seed-behaviours.md) once, in offline
wandb and in the files of the run directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.core.trajectory import Task
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import StepResult
from tests.fakes.wandb_file import history
from tests.trainer.test_episodes import EpisodesRun, Say, tasks_of

ROOT = Path(__file__).resolve().parents[2]
THIS = "tests.trainer.test_document_metrics"
KEPT_VARIABLES = ("HOME", "PATH", "TMPDIR", "VIRTUAL_ENV")
ADDED_BY_WANDB = {"_runtime", "_step", "_timestamp"}

# The metric names of each step and of each evaluation. The keys are the numbers of the seed documents
# (docs/seed-behaviours.md) and of their sections that list these names.
EVERY_STEP = {
    "001 and 002, section 15": (
        "generation/avg_reward generation/success_rate train/avg_reward train/min_reward train/max_reward "
        "reward/avg_raw_reward reward/parse_failure_rate loss/avg_raw_rewards loss/avg_raw_advantages "
        "timing/step timing/generate"
    ),
    "002, section 22": (
        "generate/min_num_tokens generate/max_num_tokens generate/avg_num_tokens generate/std_num_tokens "
        "generate/avg_tokens_non_zero_rewards generate/avg_tokens_zero_rewards"
    ),
    "004, section 6 and rule 6": (
        "reward/retail/variance_per_prompt reward/airline/variance_per_prompt reward/retail/pass_at_4 "
        "reward/airline/pass_at_4"
    ),
}
EVERY_EVALUATION = {
    "001 and 002, section 15": (
        "eval/all/avg_score eval-retail/success_rate test-retail/average_reward test-airline/average_reward"
    ),
    "001 and 002, section 8": "test-retail/success_rate test-airline/success_rate",
    "004, section 4": "eval/retail/pass_at_3 eval/airline/pass_at_3",
}


class Parsing(Say):
    """An environment that reports parse metrics, as environments with tools do."""

    async def step(self, answer: str) -> StepResult:
        result = await super().step(answer)
        return replace(result, metrics={**result.metrics, "parse_attempts": 1.0, "parse_failures": 0.0})


def open_shop(config, chat):
    def tasks(split: str, *domains: str) -> list[Task]:
        return [task for domain in domains for task in tasks_of(domain, split, 2)]

    spec = EnvSpec(
        tasks=tasks("train", "retail", "airline"),
        held_out=tasks("test", "retail", "airline", "retail_val"),
        make=Parsing,
    )
    return episodes(config, chat, spec)


async def train(directory: Path) -> None:
    options = ("n_epochs=2", "eval_every=2", "temperature=1", "wandb_project=harbor-training")
    await EpisodesRun(directory).trained(f"env={THIS}:open_shop", *options)


def only_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary. No name may occur twice."""
    assert max(Counter(name for name, _ in pairs).values(), default=1) == 1
    return dict(pairs)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, object_pairs_hook=only_once) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps in a separate process, because wandb starts threads and processes."""
    directory = tmp_path_factory.mktemp("offline")
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    environment |= {"WANDB_MODE": "offline", "HOME": str(directory)}
    done = subprocess.run(
        [sys.executable, "-m", THIS, str(directory)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "run"


@pytest.fixture(scope="module")
def wandb_steps(run_directory: Path) -> list[dict[str, Any]]:
    [file] = run_directory.glob("wandb/offline-run-*/run-*.wandb")
    return [only_once(step) for step in history(file)]


def names(table: dict[str, str]) -> set[str]:
    return {name for names in table.values() for name in names.split()}


@pytest.mark.seed_behaviour(24, 143)
def test_wandb_has_every_name_of_the_documents_once(wandb_steps: list[dict[str, Any]]) -> None:
    assert [step["_step"] for step in wandb_steps] == [0, 1, 2]
    for step in wandb_steps[1:]:
        assert names(EVERY_STEP) <= step.keys()
    for step in (wandb_steps[0], wandb_steps[2]):
        assert names(EVERY_EVALUATION) <= step.keys()
    assert not names(EVERY_EVALUATION) & wandb_steps[1].keys()


@pytest.mark.seed_behaviour(24)
def test_the_files_of_a_run_equal_wandb(run_directory: Path, wandb_steps: list[dict[str, Any]]) -> None:
    recorded = lines(run_directory / "metrics.jsonl")
    for step, line in zip(wandb_steps, recorded, strict=True):
        values = {name: value for name, value in line.items() if value is not None}
        assert values.pop("step") == step["_step"]
        assert {name: step[name] for name in step.keys() - ADDED_BY_WANDB} == values
    for step in (0, 2):
        directory = run_directory / "dumped_evals" / f"global_step_{step}_evals"
        [aggregated] = lines(directory / "aggregated_results.jsonl")
        assert names(EVERY_EVALUATION) <= aggregated.keys()
        evaluated = aggregated.keys() & recorded[step].keys()
        assert {name: aggregated[name] for name in evaluated} == {
            name: recorded[step][name] for name in evaluated
        }


@pytest.mark.seed_behaviour(151)
def test_the_signal_of_a_run_is_read_as_in_the_documents(wandb_steps: list[dict[str, Any]]) -> None:
    """The test selects wandb columns as section 6 of seed document 004 does. The signal of a run is the
    variance of the rewards of a prompt."""
    columns = {name for step in wandb_steps for name in step}
    variances = [name for name in columns if "variance_per_prompt" in name and name.startswith("reward/")]
    environments = {name.split("/")[1] for name in variances if name.count("/") == 2}
    assert environments == {"retail", "airline"}
    values = [step[name] for step in wandb_steps[1:] for name in variances]
    assert all(0 <= value <= 0.25 for value in values) and any(values)


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1])))
