"""Message environments as a task source: what a run does with Harbor's trials, it does with theirs."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from src.cli.command_line import parse, parse_as
from src.cli.console import Display
from src.core.errors import ConfigError
from src.core.trajectory import StopReason, Task, Trajectory
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import ResetResult, StepResult
from src.envs.registry import known, open_task_source
from src.evaluate.config import EvaluateConfig
from src.evaluate.contamination import content_hash
from src.evaluate.run import Evaluated
from src.evaluate.run import run as run_evaluation
from src.loop.connection import Dependencies
from tests.fakes.backend import BanditBackend
from tests.fakes.policy import FakePolicy
from tests.fakes.run import OWN_SERVER, FakeRun
from tests.fakes.tokenizer import toy_chat

ENV = "env=tests.trainer.test_episodes:open_say"
HERE = Path(__file__)
closed: list[str] = []


class Say:
    """Two answers; each that is the wanted character earns a half, and what was said is measured."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.num_answers = task, seed, 0

    async def start(self) -> ResetResult:
        return ResetResult(messages=[{"role": "user", "content": self.task.instruction}])

    async def step(self, answer: str) -> StepResult:
        self.num_answers += 1
        return StepResult(
            messages=[{"role": "user", "content": "again"}],
            reward=0.5 * (answer == self.task.row["wanted"]),
            is_done=self.num_answers == 2,
            metrics={"seed": float(self.seed)},
        )

    async def close(self) -> None:
        closed.append(self.task.id)


def rows(domain: str, split: str, number: int) -> list[Task]:
    wanted = {"wanted": "\n"}  # token 3 of the toy tokenizer
    return [
        Task(id=f"{domain}-{split}-{n}", path=HERE, instruction="say", domain=domain, row=wanted)
        for n in range(number)
    ]


def open_say(config, chat):
    tasks = [*rows("retail", "train", 2), *rows("airline", "train", 2)]
    return episodes(
        config,
        chat,
        EnvSpec(tasks=tasks, held_out=[*rows("retail", "test", 1), *rows("airline", "test", 1)], make=Say),
    )


def config(*options: str):
    return parse([*OWN_SERVER, ENV, *options])


class Bench(FakeRun):
    """A run on the bandit, with the environment that the options name."""

    def __init__(self, path: Path) -> None:
        backend = BanditBackend()
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
async def test_the_loop_trains_on_episodes_as_it_is(tmp_path, options):
    bench = Bench(tmp_path)
    metrics = await bench.trained(
        "n_epochs=20", "eval_every=0", "eval_group_size=8", "temperature=1", *options
    )
    assert metrics[0]["test/env/all/reward/total"] < 0.6
    assert metrics[-1]["test/env/all/reward/total"] > 0.9


async def test_episodes_are_played_while_training(tmp_path):
    metrics = await Bench(tmp_path).trained(
        "n_epochs=6", "eval_every=0", "temperature=1", "max_staleness=1", "loss_fn=ppo"
    )
    assert [line["step"] for line in metrics] == list(range(7))
    assert max(line["staleness/max"] for line in metrics[1:]) >= 1
    assert all(
        line["staleness/max"] <= 1 or line["staleness/masked_tokens"] > 0 for line in metrics[1:]
    )  # nothing older is trained


async def test_metrics_records_and_dumps_are_split_by_domain(tmp_path):
    bench = Bench(tmp_path)
    metrics = await bench.trained("max_steps=1", "eval_every=0", "temperature=1")
    assert {"reward/retail/pass_at_4", "reward/airline/pass_at_4", "env/all/seed"} <= set(metrics[1])
    assert {
        "test/env/retail/reward/total",
        "test/env/airline/reward/total",
        "test/env/airline/pass_hat_4",
    } <= set(metrics[0])
    for domain in ("retail", "airline"):  # the seeds' names
        assert metrics[0][f"test-{domain}/average_reward"] == metrics[0][f"test/env/{domain}/reward/total"]
        assert {
            f"test-{domain}/{name}" for name in ("success_rate", "num_samples", "min_reward", "max_reward")
        } <= set(metrics[0])
        assert {
            f"eval/{domain}/{name}" for name in ("avg_score", "pass_at_4", "mean_positive_reward")
        } <= set(metrics[0])
    folder = bench.path / "dumped_evals" / "global_step_0_evals"
    assert {path.name for path in folder.iterdir()} == {
        "retail.jsonl",
        "airline.jsonl",
        "aggregated_results.jsonl",
    }
    first = json.loads((folder / "retail.jsonl").read_text().splitlines()[0])
    assert first["domain"] == "retail" and first["conversation"][0] == {"role": "user", "content": "say"}
    records = bench.lines("rollouts/step_000001.jsonl")
    assert len({record["trial"] for record in records}) == 16 and all(
        "seed" in record["metrics"] for record in records
    )


async def test_a_run_ends_with_what_its_steps_had_to_learn_from(tmp_path):
    bench = Bench(tmp_path)
    metrics = await bench.trained("n_epochs=3", "eval_every=0", "temperature=1")
    variances = [line["reward/retail/variance_per_prompt"] for line in metrics[1:]]
    share = sum(variance > 0 for variance in variances) / 3
    line = next(line for line in bench.text.getvalue().splitlines() if line.startswith("signal of retail: "))
    assert line.startswith(
        f"signal of retail: mean variance per prompt {sum(variances) / 3:.4f}, {share:.0%} of 3 steps with any"
    )
    assert "signal of all tasks: " in bench.text.getvalue() and "signal of airline: " in bench.text.getvalue()


async def test_an_interrupted_run_goes_on_and_plays_nothing_twice(tmp_path):
    bench = Bench(tmp_path)
    await bench.trained("max_steps=1", "eval_every=0", "temperature=1")
    closed.clear()
    metrics = await bench.trained(
        "max_steps=2", "eval_every=0", "temperature=1", "n_epochs=2", "behavior_if_log_dir_exists=resume"
    )
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert len(closed) == 16 + 8  # the second step and the last evaluation


async def test_evaluation_plays_training_and_held_out_tasks_by_name(tmp_path):
    @asynccontextmanager
    async def opened(config, checkpoint):
        yield Evaluated(
            policy=FakePolicy(toy_chat(), ["\n"]), source=open_task_source(config.trials, toy_chat())
        )

    chosen = parse_as(
        EvaluateConfig, [*OWN_SERVER, ENV, "tasks=*-test-*", "n_samples=2", f"log_path={tmp_path / 'e'}"]
    )
    await run_evaluation(chosen, Display(Console(file=io.StringIO())), open_evaluated=opened)
    results = json.loads((tmp_path / "e" / "results.json").read_text())
    assert [task["id"] for task in results["tasks"]] == ["retail-test-0", "airline-test-0"]


async def test_the_same_seed_plays_the_same_episode_and_names_it():
    source = open_task_source(config("max_turns=1", "context_limit=40", "max_tokens=8"), toy_chat())
    trial = source.trial(source.train[0], directory=HERE, seed=7, temperature=0.3)
    policy = FakePolicy(toy_chat(), ["\n"])
    result = await trial.run(policy)
    assert isinstance(result, Trajectory)
    assert (result.trial_name, result.stop_reason) == ("retail-train-0__00000007", StopReason.MAX_TURNS)
    assert (policy.calls[0].temperature, policy.calls[0].max_tokens) == (0.3, 8)
    await source.trial(source.train[0], directory=HERE, seed=7, temperature=0.3).run(policy)
    assert policy.calls[0] == policy.calls[1]


async def test_an_environment_is_the_same_in_every_step_and_another_for_every_sample():
    async def drawn(*options: str, seed: int, member: int) -> float:
        source = open_task_source(
            config("max_turns=1", "context_limit=40", "max_tokens=8", *options), toy_chat()
        )
        trial = source.trial(source.train[0], directory=HERE, seed=seed, temperature=0.3, member=member)
        result = await trial.run(FakePolicy(toy_chat(), ["\n"]))
        assert isinstance(result, Trajectory)
        return result.metrics["seed"]

    first = await drawn(seed=7, member=0)
    assert first == await drawn(seed=8, member=0)
    assert len({first, await drawn(seed=7, member=1), await drawn("seed=1", seed=7, member=0)}) == 3


@pytest.mark.parametrize(
    ("options", "held_out"),
    [
        ([], ["retail-test-0", "airline-test-0"]),
        (["eval_split=0.5"], ["retail-test-0", "airline-test-0"]),
        (["eval_tasks=retail-*"], None),
        (["eval_tasks=airline-test-*"], ["airline-test-0"]),
    ],
)
def test_a_test_split_of_its_own_is_what_is_held_out(options, held_out):
    if held_out is None:
        with pytest.raises(ConfigError, match="retail-train-0 is a training task of this environment"):
            open_task_source(config(*options), toy_chat())
        return
    source = open_task_source(config(*options), toy_chat())
    assert [task.id for task in source.eval] == held_out and len(source.train) == 4


def test_without_one_the_options_choose():
    domain = EnvSpec(tasks=rows("d", "x", 10), make=Say)
    source = episodes(config("eval_split=0.2"), toy_chat(), domain)
    assert (len(source.train), len(source.eval)) == (8, 2)
    assert [task.id for task in episodes(config("eval_tasks=*-3"), toy_chat(), domain).eval] == ["d-x-3"]
    with pytest.raises(ConfigError, match="'nobody' is neither"):
        episodes(config("eval_tasks=nobody"), toy_chat(), domain)


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tasks are called d-x-0"):
        episodes(config(), toy_chat(), EnvSpec(tasks=rows("d", "x", 1), held_out=rows("d", "x", 1), make=Say))


def test_rows_of_one_file_are_different_tasks():
    first, second = rows("d", "x", 2)
    assert content_hash(first) != content_hash(second) == content_hash(replace(second, row={}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("retial", "env=retial is none of harbor.*; choose one, or give your own as env=module:factory"),
        (
            "no.such.module:open",
            r"cannot import no.such.module \(No module named 'no'\); is it installed, or on PYTHONPATH\?",
        ),
        ("tests.trainer.test_episodes:nothing", "tests.trainer.test_episodes has no function nothing"),
    ],
)
def test_an_unknown_environment_is_one_line(name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        open_task_source(config(f"env={name}"), toy_chat())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (":f", "env=:f is none of"),
        (".mine:f", "env=.mine:f is none of"),
        ("mine:", "env=mine: is none of"),
        (
            "mine:NUMBER",
            "env=mine:NUMBER: NUMBER of mine is no plain function; write def NUMBER(config, chat)",
        ),
        ("mine:later", "env=mine:later: later of mine is no plain function; write def later(config, chat)"),
        ("mine:nothing", "env=mine:nothing returned NoneType, which is no task source; return episodes(...)"),
        (
            "mine:no_options",
            "env=mine:no_options: TypeError: no_options() takes 0 positional arguments but 2 were given",
        ),
        ("mine:broken", "env=mine:broken: RuntimeError: no data"),
        ("torn:f", "env=torn:f: cannot import torn (SyntaxError: "),
    ],
)
def test_what_is_wrong_with_ones_own_environment_is_one_line(env, message, tmp_path, monkeypatch):
    (tmp_path / "torn.py").write_text("def f(:\n")
    (tmp_path / "mine.py").write_text(
        "NUMBER = 5\nasync def later(config, chat): ...\ndef nothing(config, chat): ...\ndef no_options(): ...\n"
        "def broken(config, chat): raise RuntimeError('no data')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        open_task_source(config(f"env={env}"), toy_chat())


def test_a_package_registers_its_environments_by_name(tmp_path, monkeypatch):
    """As pip leaves them: an entry point in the package's metadata. It cannot take the place of a built-in one."""
    package = tmp_path / "shop-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    lines = [
        "[agent_trainer.environments]",
        "shop = tests.trainer.test_episodes:open_say",
        "harbor = tests.trainer.test_episodes:nothing",
    ]
    (package / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert (
        known()["shop"] == "tests.trainer.test_episodes:open_say"
        and known()["harbor"] == "src.envs.harbor.environment:open_harbor"
    )
    assert len(open_task_source(config("env=shop"), toy_chat()).train) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["environment_type=docker"], "environment_type is for env=harbor, not env=tests"),
        (["max_consecutive_truncations=1"], "max_consecutive_truncations is for env=harbor"),
        (["env=harbor"], "missing: tasks_dir"),
        (["env=harbor", "tasks_dir=t", "use_native_tool_calling=true"], "Terminus-2 calls no tools"),
    ],
)
def test_what_an_environment_cannot_honour_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config(*options)


def test_tools_are_shown_in_words_unless_asked_for():
    assert (
        config().use_native_tool_calling is False
        and config("use_native_tool_calling=true").use_native_tool_calling is True
    )


def test_an_endpoint_that_hides_its_template_cannot_show_tools_natively():
    with pytest.raises(ConfigError, match="use_native_tool_calling needs the model's own chat template"):
        parse_as(
            EvaluateConfig, ["model_name=m", ENV, "base_url=http://h/v1", "use_native_tool_calling=true"]
        )
