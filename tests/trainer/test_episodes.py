"""Tests the task source of message environments, alone and in whole runs."""

from __future__ import annotations

import io
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from src.cli.command_line import parse, parse_as
from src.cli.console import Display
from src.core.errors import ConfigError
from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrialFailure
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import ResetResult, StepResult
from src.envs.registry import open_task_source
from src.envs.splits import chosen_tasks
from src.evaluate.config import EvaluateConfig
from src.evaluate.contamination import content_hash
from src.evaluate.run import PolicyAndTasks
from src.evaluate.run import run as run_evaluation
from src.loop.connection import Dependencies
from tests.fakes.backend import BanditBackend, BanditSampler
from tests.fakes.policy import FakePolicy
from tests.fakes.run import OWN_SERVER, FakeRun
from tests.fakes.tokenizer import toy_chat
from tests.fakes.wandb_module import FakeWandb

ENV = "env=tests.trainer.test_episodes:open_say"
HERE = Path(__file__)
closed: list[str] = []


class Say:
    """An environment of two answers. The reward is 0.5 for each answer that is the expected character."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.num_answers = task, seed, 0

    async def start(self) -> ResetResult:
        return ResetResult(messages=[{"role": "user", "content": self.task.instruction}])

    async def step(self, answer: str) -> StepResult:
        self.num_answers += 1
        return StepResult(
            messages=[{"role": "user", "content": "again"}],
            reward=0.5 * (answer == self.task.row["expected"]),
            is_done=self.num_answers == 2,
            metrics={"seed": float(self.seed)},
        )

    async def close(self) -> None:
        closed.append(self.task.id)


def tasks_of(domain: str, split: str, number: int) -> list[Task]:
    row = {"expected": "\n"}  # token 3 of the toy tokenizer
    return [
        Task(id=f"{domain}-{split}-{n}", path=HERE, instruction="say", domain=domain, row=row)
        for n in range(number)
    ]


def open_say(config, chat):
    tasks = [*tasks_of("retail", "train", 2), *tasks_of("airline", "train", 2)]
    return episodes(
        config,
        chat,
        EnvSpec(
            tasks=tasks, held_out=[*tasks_of("retail", "test", 1), *tasks_of("airline", "test", 1)], make=Say
        ),
    )


def config(*options: str):
    return parse([*OWN_SERVER, ENV, *options])


class EpisodesRun(FakeRun):
    """A run with the environment that the options select, on a fake backend."""

    def __init__(self, path: Path) -> None:
        backend: Any = BanditBackend()
        super().__init__(
            path / "run",
            lambda config: Dependencies(source=open_task_source(config, toy_chat()), backend=backend),
        )

    async def trained(self, *options: str) -> list[dict]:
        await self.go(
            ENV, "batch_size=4", "group_size=4", "learning_rate=2", "loss_reduction=sequence_mean", *options
        )
        return self.lines("metrics.jsonl")


@pytest.mark.parametrize("options", [[], ["step_wise_trajectories=true"]])
@pytest.mark.seed_behaviour(94)
async def test_the_training_loop_trains_on_episodes(tmp_path, options):
    run = EpisodesRun(tmp_path)
    metrics = await run.trained("n_epochs=20", "eval_every=0", "eval_group_size=8", "temperature=1", *options)
    assert metrics[0]["test/env/all/reward/total"] < 0.6
    assert metrics[-1]["test/env/all/reward/total"] > 0.9


async def test_episodes_run_while_training(tmp_path):
    metrics = await EpisodesRun(tmp_path).trained(
        "n_epochs=6", "eval_every=0", "temperature=1", "max_staleness=1", "loss_fn=ppo"
    )
    assert [line["step"] for line in metrics] == list(range(7))
    assert max(line["staleness/max"] for line in metrics[1:]) >= 1
    # Tokens that are older than max_staleness are masked.
    assert all(line["staleness/max"] <= 1 or line["staleness/masked_tokens"] > 0 for line in metrics[1:])


@pytest.mark.seed_behaviour(19)
async def test_metrics_are_split_by_domain(tmp_path):
    metrics = await EpisodesRun(tmp_path).trained("max_steps=1", "eval_every=0", "temperature=1")
    assert {"reward/retail/pass_at_4", "reward/airline/pass_at_4", "env/all/seed"} <= set(metrics[1])
    for domain in ("retail", "airline"):
        assert {f"test/env/{domain}/reward/total", f"test/env/{domain}/pass_hat_4"} <= set(metrics[0])


@pytest.mark.seed_behaviour(17)
async def test_evaluation_metrics_also_have_the_names_of_the_seeds(tmp_path):
    [line, *_] = await EpisodesRun(tmp_path).trained("max_steps=1", "eval_every=0", "temperature=1")
    for domain in ("retail", "airline"):
        assert line[f"test-{domain}/average_reward"] == line[f"test/env/{domain}/reward/total"]
        names = ("success_rate", "num_samples", "min_reward", "max_reward")
        assert {f"test-{domain}/{name}" for name in names} <= set(line)
        names = ("avg_score", "pass_at_4", "mean_positive_reward")
        assert {f"eval/{domain}/{name}" for name in names} <= set(line)


@pytest.mark.seed_behaviour(80)
async def test_eval_top_p_applies_only_to_evaluations(tmp_path, monkeypatch):
    top_ps, sample = [], BanditSampler.sample

    def recorded(self, prompt, num_samples, sampling_params):
        top_ps.append(sampling_params.top_p)
        return sample(self, prompt, num_samples, sampling_params)

    monkeypatch.setattr(BanditSampler, "sample", recorded)
    await EpisodesRun(tmp_path).trained("max_steps=1", "eval_every=0", "eval_group_size=1", "eval_top_p=0.9")
    assert [top_p for top_p, _ in groupby(top_ps)] == [0.9, 1.0, 0.9]  # evaluation, training, evaluation


@pytest.mark.seed_behaviour(24, 149)
async def test_pass_at_every_k_is_in_every_file_and_in_wandb(tmp_path, monkeypatch):
    """With a group size of 4, pass@k is reported for k from 1 to 4, including SkyRL's pass@3."""
    wandb = FakeWandb()
    wandb.released.set()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = EpisodesRun(tmp_path)
    line = (await run.trained("max_steps=1", "eval_every=0", "temperature=1", "wandb_project=p"))[0]
    [dumped] = run.lines("dumped_evals/global_step_0_evals/aggregated_results.jsonl")
    scopes = ("all", "retail", "airline")
    names = {f"eval/{scope}/pass_at_{k}" for scope in scopes for k in (1, 2, 3, 4)}
    for metrics in (line, dumped, dict(wandb.logged)[0]):
        assert names <= set(metrics)
        assert {name: metrics[name] for name in names} == {name: line[name] for name in names}
    assert line["eval/retail/pass_at_1"] <= line["eval/retail/pass_at_3"] <= line["eval/retail/pass_at_4"]
    assert {"eval/all/avg_score", "test-retail/success_rate"} <= set(dumped)


async def test_dumps_are_split_by_domain(tmp_path):
    run = EpisodesRun(tmp_path)
    await run.trained("max_steps=1", "eval_every=0", "temperature=1")
    directory = run.path / "dumped_evals" / "global_step_0_evals"
    names = {"retail.jsonl", "airline.jsonl", "aggregated_results.jsonl"}
    assert {path.name for path in directory.iterdir()} == names
    first = json.loads((directory / "retail.jsonl").read_text().splitlines()[0])
    assert first["domain"] == "retail" and first["conversation"][0] == {"role": "user", "content": "say"}


async def test_rollouts_have_names_and_environment_metrics(tmp_path):
    run = EpisodesRun(tmp_path)
    await run.trained("max_steps=1", "eval_every=0", "temperature=1")
    records = run.lines("rollouts/step_000001.jsonl")
    assert len({record["trial"] for record in records}) == 16
    assert all("seed" in record["metrics"] for record in records)


@pytest.mark.seed_behaviour(151)
async def test_a_run_reports_the_signal_of_each_domain(tmp_path):
    run = EpisodesRun(tmp_path)
    metrics = await run.trained("n_epochs=3", "eval_every=0", "temperature=1")
    variances = [line["reward/retail/variance_per_prompt"] for line in metrics[1:]]
    num_with_signal = sum(variance > 0 for variance in variances)
    lines, mean = run.text.getvalue().splitlines(), sum(variances) / 3
    expected = (
        f"training signal of retail: rewards differ within a group in {num_with_signal} of 3 steps, "
        f"mean variance {mean:.3g}"
    )
    assert any(line.startswith(expected) for line in lines)
    assert all(f"training signal of {name}: " in run.text.getvalue() for name in ("all tasks", "airline"))


async def test_a_resumed_run_repeats_no_episode(tmp_path):
    run = EpisodesRun(tmp_path)
    await run.trained("max_steps=1", "eval_every=0", "temperature=1")
    closed.clear()
    metrics = await run.trained(
        "max_steps=2", "eval_every=0", "temperature=1", "n_epochs=2", "behavior_if_log_dir_exists=resume"
    )
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert len(closed) == 16 + 8  # episodes of the second step and of the last evaluation


async def test_evaluation_selects_tasks_by_name(tmp_path):
    @asynccontextmanager
    async def opened(config, checkpoint):
        yield PolicyAndTasks(
            policy=FakePolicy(toy_chat(), ["\n"]), source=open_task_source(config.environment, toy_chat())
        )

    chosen = parse_as(
        EvaluateConfig, [*OWN_SERVER, ENV, "tasks=*-test-*", "n_samples=2", f"log_path={tmp_path / 'e'}"]
    )
    await run_evaluation(chosen, Display(Console(file=io.StringIO())), open_policy_and_tasks=opened)
    results = json.loads((tmp_path / "e" / "results.json").read_text())
    assert [task["id"] for task in results["tasks"]] == ["retail-test-0", "airline-test-0"]


async def one_turn(*options: str, seed: int = 7, member: int = 0) -> tuple[Trajectory, FakePolicy]:
    source = open_task_source(config("max_turns=1", "context_limit=40", "max_tokens=8", *options), toy_chat())
    policy = FakePolicy(toy_chat(), ["\n"])
    trial = source.trial(source.train[0], directory=HERE, seed=seed, temperature=0.3, member=member)
    result = await trial.run(policy)
    assert isinstance(result, Trajectory)
    return result, policy


async def test_the_name_of_a_trial_has_its_task_and_seed():
    trajectory, _ = await one_turn(seed=7)
    assert trajectory.trial_name == "retail-train-0__00000007"


async def test_an_episode_has_the_limits_of_the_run():
    trajectory, policy = await one_turn()
    assert trajectory.stop_reason == StopReason.MAX_TURNS
    assert (policy.calls[0].temperature, policy.calls[0].max_tokens) == (0.3, 8)


async def test_the_same_seed_makes_the_same_calls():
    _, first = await one_turn()
    _, second = await one_turn()
    assert first.calls == second.calls


async def test_the_environment_of_a_member_is_the_same_in_every_step():
    (first, _), (second, _) = await one_turn(seed=7), await one_turn(seed=8)
    assert first.metrics["seed"] == second.metrics["seed"]


@pytest.mark.parametrize(("options", "member"), [([], 1), (["seed=1"], 0)])
async def test_the_environment_differs_by_member_and_run_seed(options, member):
    (first, _), (second, _) = await one_turn(), await one_turn(*options, member=member)
    assert first.metrics["seed"] != second.metrics["seed"]


@pytest.mark.parametrize("error", [ValueError("no board"), SystemExit("no board")])
async def test_an_environment_that_cannot_be_made_is_a_failure(error):
    def make(task: Task, seed: int):
        raise error

    source = episodes(config(), toy_chat(), EnvSpec(tasks=tasks_of("d", "x", 2), make=make))
    trial = source.trial(source.train[0], directory=HERE, seed=1, temperature=1.0)
    result = await trial.run(FakePolicy(toy_chat(), []))
    assert isinstance(result, TrialFailure)
    assert result.kind == FailureKind.ENV_INIT_FAILED
    assert result.message.startswith(f"{type(error).__name__}: no board (tests/trainer/test_episodes.py:")


@pytest.mark.parametrize(
    ("options", "held_out"),
    [
        ([], ["retail-test-0", "airline-test-0"]),
        (["eval_split=0.5"], ["retail-test-0", "airline-test-0"]),
        (["eval_tasks=airline-test-*"], ["airline-test-0"]),
    ],
)
def test_the_test_split_of_an_environment_is_held_out(options, held_out):
    source = open_task_source(config(*options), toy_chat())
    assert [task.id for task in source.eval] == held_out and len(source.train) == 4


def test_with_a_test_split_no_training_task_can_be_held_out():
    with pytest.raises(ConfigError, match="retail-train-0 is a training task of this environment"):
        open_task_source(config("eval_tasks=retail-*"), toy_chat())


TEN_TASKS = EnvSpec(tasks=tasks_of("d", "x", 10), make=Say)


def test_an_environment_without_tasks_is_refused():
    with pytest.raises(ConfigError, match="the environment has no tasks"):
        episodes(config("eval_split=0.2"), toy_chat(), replace(TEN_TASKS, tasks=[]))


def test_without_a_test_split_eval_split_holds_out_a_share():
    source = episodes(config("eval_split=0.2"), toy_chat(), TEN_TASKS)
    assert (len(source.train), len(source.eval)) == (8, 2)


def test_without_a_test_split_eval_tasks_holds_out_by_name():
    assert [task.id for task in episodes(config("eval_tasks=*-3"), toy_chat(), TEN_TASKS).eval] == ["d-x-3"]


def test_an_exact_id_is_not_read_as_a_pattern():
    tasks = [Task(id=name, path=Path(name)) for name in ("a[1]", "b")]
    assert chosen_tasks(tasks, ["a[1]"]) == tasks[:1]


def test_eval_tasks_that_match_no_task_are_refused():
    with pytest.raises(ConfigError, match="'nobody' matches no task"):
        episodes(config("eval_tasks=nobody"), toy_chat(), TEN_TASKS)


def test_two_tasks_with_the_same_id_are_refused():
    with pytest.raises(ConfigError, match="two tasks have the id d-x-0"):
        episodes(
            config(),
            toy_chat(),
            EnvSpec(tasks=tasks_of("d", "x", 1), held_out=tasks_of("d", "x", 1), make=Say),
        )


def test_rows_of_one_file_have_different_content_hashes():
    first, second = tasks_of("d", "x", 2)
    assert content_hash(first) != content_hash(second) == content_hash(replace(second, row={}))


@pytest.mark.parametrize("option", ["train_data", "test_data", "tasks_dir"])
def test_an_option_that_the_environment_does_not_read_is_refused(option: str):
    options = config(f"{option}=files")
    assert episodes(options, toy_chat(), replace(TEN_TASKS, reads=[option])).train
    with pytest.raises(ConfigError, match=rf"^env={ENV.partition('=')[2]} does not read {option}; remove it"):
        episodes(options, toy_chat(), TEN_TASKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["environment_type=docker"], "environment_type is for env=harbor, not env=tests"),
        (["max_consecutive_truncations=1"], "max_consecutive_truncations is for env=harbor"),
        (["env=harbor"], "missing: tasks_dir"),
        (["env=harbor", "tasks_dir=t", "use_native_tool_calling=true"], "Terminus-2 does not call tools"),
    ],
)
def test_options_that_an_environment_lacks_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config(*options)


@pytest.mark.parametrize(("options", "is_native"), [([], False), (["use_native_tool_calling=true"], True)])
@pytest.mark.seed_behaviour(2)
def test_native_tool_calling_is_off_by_default(options, is_native):
    assert config(*options).use_native_tool_calling is is_native


def test_native_tools_need_the_models_own_template():
    with pytest.raises(ConfigError, match="use_native_tool_calling needs the model's own chat template"):
        parse_as(
            EvaluateConfig, ["model_name=m", ENV, "base_url=http://h/v1", "use_native_tool_calling=true"]
        )
