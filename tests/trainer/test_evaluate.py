import asyncio
import io
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from src.cli.command_line import parse_as
from src.cli.console import Display
from src.core import wait_notice
from src.core.errors import ConfigError, TooManyFailuresError
from src.core.trajectory import FailureKind, Task
from src.evaluate.__main__ import main
from src.evaluate.config import EvaluateConfig
from src.evaluate.contamination import content_hash, write_hashes
from src.evaluate.eval_stats import Estimate
from src.evaluate.results import formatted_rates
from src.evaluate.run import PolicyAndTasks, evaluated_tasks, run
from src.policy.sampling_policy import TopPPolicy
from src.records.checkpoints import Checkpoint, append
from tests.fakes.policy import UnusedPolicy
from tests.fakes.trials import FakeTasks, failure, trajectory, turn

SERVER = [
    "backend=skyrl-tx",
    "skyrl_tx_url=http://h:1",
    "model_name=m",
    "tasks_dir=t",
    "retry_wait_s=0",
    "n_parallel_envs=4",
]
TASKS = [
    Task(id=f"say-{number:02d}", path=Path("tasks") / str(number), instruction=f"say {number}")
    for number in range(8)
]


THINKING = (
    "error: enable_thinking needs the model's own chat template, which base_url does not give; remove "
    "enable_thinking or base_url"
)
ONE_POLICY = (
    "error: compare_with=base is not the directory of a finished evaluation; with base_url, only finished "
    "evaluations can be compared; give such a directory"
)
EXCLUSIVE = "error: base_url and checkpoint exclude each other; for a checkpoint of skyrl-tx use skyrl_tx_url"


class Bench:
    """Runs evaluations on fakes.

    `solves(checkpoint, task_id, member)` is the reward of a trial. Trials whose `(task_id, member)` is in
    `lost` fail. Each trial takes at least `iterations` iterations of the event loop.
    """

    def __init__(self, path, solves, *, lost=(), iterations=0):
        self.path = path / "evaluation"
        self.text = io.StringIO()
        self.opened = []
        self.num_trials = 0
        self.policies = []
        self._solves, self.lost = solves, lost
        self._iterations = iterations
        self.tasks = TASKS
        self.noop_rewards = {}
        self.metrics = {}

    async def go(self, *options):
        config = parse_as(EvaluateConfig, [*SERVER, f"log_path={self.path}", *options])
        await run(config, Display(Console(file=self.text, width=200)), open_policy_and_tasks=self._open)

    @asynccontextmanager
    async def _open(self, config, checkpoint):
        self.opened.append(checkpoint)
        members = {}

        async def run_trial(trial, policy):
            self.num_trials += 1
            self.policies.append(policy)
            for _ in range(self._iterations):
                await asyncio.sleep(0)
            member = members[trial.task.id] = members.get(trial.task.id, -1) + 1
            name = f"{trial.task.id}-{member}"
            if (trial.task.id, member) in self.lost:
                return failure(trial.task.id, FailureKind.BACKEND, "gone")
            reward = float(self._solves(checkpoint, trial.task.id, member))
            result = trajectory(trial.task.id, reward, [turn([1], [2])], name=name)
            return replace(result, metrics=self.metrics)

        yield PolicyAndTasks(
            policy=UnusedPolicy(0),
            source=FakeTasks(train=self.tasks, run_trial=run_trial, noop_rewards=self.noop_rewards),
        )

    def results(self, name="results.json"):
        return json.loads((self.path / name).read_text())


def first_half(checkpoint, task, member):
    return member < 2


async def test_a_wait_for_the_first_trials_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(wait_notice, "SLOW_S", 0.0)
    bench = Bench(tmp_path, first_half, iterations=5)
    await bench.go("n_samples=4")
    text = bench.text.getvalue()
    assert text.count("waiting for the first trials; the server may compile its programs\n") == 1


async def test_results_have_rates_with_intervals_and_every_task(tmp_path):
    bench = Bench(tmp_path, first_half)
    await bench.go("n_samples=4")
    results = bench.results()
    assert results["evaluated"] == "m"
    assert {name: rate["value"] for name, rate in results["rates"].items()} == pytest.approx(
        {
            **{"pass_at_1": 0.5, "pass_at_2": 5 / 6, "pass_at_3": 1.0, "pass_at_4": 1.0},
            **{"pass_hat_1": 0.5, "pass_hat_2": 1 / 6, "pass_hat_3": 0.0, "pass_hat_4": 0.0},
        }
    )
    assert results["rates"]["pass_at_1"]["low"] < 0.5 < results["rates"]["pass_at_1"]["high"]
    assert [(task["id"], task["solved"], task["graded"]) for task in results["tasks"]] == [
        (task.id, 2, 4) for task in TASKS
    ]
    assert results["metrics"]["test/env/all/turns"] == 1
    text = bench.text.getvalue()
    assert "\npass@1: 50.0% [21.5%, 78.5%], pass@2: 83.3% [" in text and "\npass^1: 50.0% [" in text
    assert "], pass^4: 0.0% [0.0%, 32.4%] over 8 tasks\n" in text and "stop reasons: stop 100%" in text
    assert "mean reward" not in text
    assert (bench.path / "rollouts" / "eval_000000.jsonl").exists()


async def test_an_evaluation_does_not_continue_with_other_content(tmp_path):
    bench = Bench(tmp_path, first_half, lost={(TASKS[7].id, member) for member in range(4)})
    await bench.go("n_samples=4", "trial_attempts=1")
    # The id say-00 now belongs to another question, as after the insertion of a row in a file of questions.
    bench.tasks = [replace(TASKS[0], instruction="say 99"), *TASKS[1:]]
    with pytest.raises(
        ConfigError, match=r"the content of say-00 has changed since .*, or another version of .*; giv"
    ):
        await bench.go("n_samples=4", "trial_attempts=1")
    bench.tasks, bench.num_trials = TASKS, 0
    await bench.go("n_samples=4", "trial_attempts=1")
    assert bench.num_trials == 4  # the ungraded trials


async def test_a_wrong_comparison_is_refused_before_any_trial(tmp_path):
    bench = Bench(tmp_path, first_half)
    with pytest.raises(ConfigError, match="none is neither a tinker:// path nor a run directory"):
        await bench.go(f"compare_with={tmp_path}/none")
    assert bench.num_trials == 0


@pytest.mark.seed_behaviour(80)
async def test_top_p_is_used_and_recorded_in_the_results(tmp_path):
    bench = Bench(tmp_path, first_half)
    await bench.go("n_samples=2", "top_p=0.9")
    assert all(isinstance(policy, TopPPolicy) for policy in bench.policies) and bench.policies
    assert bench.results()["settings"]["top_p"] == 0.9


@pytest.mark.seed_behaviour(24)
async def test_results_have_the_metric_names_of_skyrl(tmp_path):
    bench = Bench(tmp_path, first_half)
    bench.tasks = [Task(id=f"air/{n}", path=Path("t"), domain="air") for n in (0, 1)]
    await bench.go("n_samples=4")
    metrics = bench.results()["metrics"]
    rates = {k: metrics[f"eval/air/pass_at_{k}"] for k in (1, 2, 3, 4)}
    assert rates == pytest.approx({1: 0.5, 2: 5 / 6, 3: 1.0, 4: 1.0})
    assert {k: metrics[f"eval/all/pass_at_{k}"] for k in rates} == rates
    assert metrics["test-air/success_rate"] == 0.5


@pytest.mark.seed_behaviour(19)
async def test_every_domain_has_a_section_of_results(tmp_path):
    bench = Bench(tmp_path, lambda checkpoint, task, member: task.startswith("air") or member == 0)
    bench.tasks = [
        Task(id=f"{domain}/{n}", path=Path("t"), domain=domain, has_writes=n == 0)
        for domain in ("air", "shop")
        for n in (0, 1)
    ]
    bench.noop_rewards = {"air/0": 0.0, "air/1": 1.0, "shop/0": 0.0, "shop/1": 0.0}
    bench.metrics = {"tool_calls": 1.0}
    await bench.go("n_samples=2")
    results = bench.results()
    assert {name: block["rates"]["pass_hat_2"]["value"] for name, block in results["domains"].items()} == {
        "air": 1.0,
        "shop": 0.0,
    }
    assert (results["noop_success"]["value"], results["domains"]["air"]["noop_success"]["value"]) == (
        0.25,
        0.5,
    )
    assert [task["noop_reward"] for task in results["tasks"]] == [0.0, 1.0, 0.0, 0.0]
    metrics = results["metrics"]
    assert (
        metrics["test/noop_success"],
        metrics["test/env/air/noop_success"],
        metrics["test/env/shop/pass_at_2"],
    ) == (0.25, 0.5, 1.0)
    assert (metrics["test/env/all/success_write"], metrics["test/env/shop/success_nowrite"]) == (0.75, 0.5)
    assert {"test/env/shop/pass_hat_1_low", "test/env/shop/turns", "test/env/shop/trials"} <= set(metrics)
    assert (
        metrics["test/env/shop/failures/false_completion"] == 1.0
        and metrics["test/env/air/failures/false_completion"] == 0.0
    )
    lines = bench.text.getvalue().splitlines()
    shop = lines[lines.index("shop:") + 1 :]
    assert shop[1].startswith("  pass^1: 50.0% [")
    assert shop[2].startswith("  an agent that does nothing: 0.0% [")
    assert (
        "  solved: 50.0% of trials of tasks that need a writing action, "
        "50.0% of trials of tasks that need none" in shop
    )
    assert "  of 2 failed trials: false completion 2" in shop


async def test_partial_rewards_are_reported_without_failure_patterns(tmp_path):
    """The environment reports no calls, so the failure pattern `false completion` has no meaning."""
    bench = Bench(tmp_path, lambda checkpoint, task, member: member / 2)
    await bench.go("n_samples=2")
    lines = bench.text.getvalue().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("mean reward"))
    assert lines[first] == "mean reward: 0.250" and lines[first + 1].startswith("pass@1: 0.0% [")
    assert "failed trials" not in bench.text.getvalue()


async def test_a_partial_grading_is_never_called_pass(tmp_path):
    bench = Bench(tmp_path, first_half)
    bench.tasks = [Task(id="a", path=Path("t"), domain="retail", grading="env")]
    await bench.go("n_samples=2")
    assert list(bench.results()["rates"]) == [
        "env_pass_at_1",
        "env_pass_hat_1",
        "env_pass_at_2",
        "env_pass_hat_2",
    ]
    assert not {"test/pass_at_1", "test/pass_hat_1", "test/env/retail/pass_at_1"} & set(
        bench.results()["metrics"]
    )
    assert "\nenv_pass^1: " in bench.text.getvalue() and "\npass" not in bench.text.getvalue()


async def test_an_unknown_noop_reward_is_left_out(tmp_path):
    bench = Bench(tmp_path, first_half)
    bench.noop_rewards = {task.id: 1.0 for task in TASKS[:4]}
    await bench.go("n_samples=1")
    assert (
        bench.results()["noop_success"]["num_tasks"] == 4 and "noop_reward" not in bench.results()["tasks"][7]
    )


async def test_ungraded_trials_are_counted_and_excluded_from_rates(tmp_path):
    bench = Bench(tmp_path, lambda *_: True, lost={("say-00", 3), ("say-01", 0)})
    await bench.go("n_samples=4", "trial_attempts=1")
    results = bench.results()
    assert results["rates"]["pass_at_1"] == pytest.approx(
        {"value": 1.0, "low": results["rates"]["pass_at_1"]["low"], "high": 1, "num_tasks": 8}
    )
    assert results["rates"]["pass_hat_4"]["num_tasks"] == 6
    assert results["tasks"][0] | {"content": ""} == {
        **{
            "id": "say-00",
            "content": "",
            "solved": 3,
            "graded": 3,
            "rewards": [1.0] * 3,
            "failures": {"backend": 1},
        }
    }
    assert "trials: 30 graded, 2 ungraded and not in the rates above: backend 2" in bench.text.getvalue()


async def test_too_many_ungraded_trials_are_an_error(tmp_path):
    lost = {(task.id, member) for task in TASKS for member in (0, 1, 2)}
    bench = Bench(tmp_path, first_half, lost=lost)
    with pytest.raises(
        TooManyFailuresError, match=r"24 of 32 trials are ungraded, more than max_failure_rate=0.5"
    ):
        await bench.go("n_samples=4", "trial_attempts=1")
    bench.lost, bench.num_trials = (), 0
    # The second call of `go` continues the evaluation, although skyrl_tx_url and tau2_home have changed.
    # Version 0.1 saved the value of TAU2_HOME as tau2_home for every environment.
    path = bench.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tau2_home": "/tau2"}))
    await bench.go("n_samples=4", "trial_attempts=1", "skyrl_tx_url=http://elsewhere:8000")
    assert bench.num_trials == 24
    assert bench.results()["metrics"]["test/trials/graded"] == 32
    with pytest.raises(ConfigError, match="belongs to another evaluation"):
        await bench.go("n_samples=8", "trial_attempts=1")


async def test_a_renamed_training_task_is_not_evaluated(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    append(
        directory,
        Checkpoint(
            name="7",
            batch=7,
            epoch=0,
            final=True,
            state_path="tinker://r/weights/7",
            sampler_path="tinker://r/s/7",
        ),
    )
    for name in ("a", "b"):
        for part, content in (("environment", "FROM x"), ("tests", f"grade {name}")):
            (tmp_path / name / part).mkdir(parents=True)
            (tmp_path / name / part / "file").write_text(content)
    copy = Task(id="copied", path=tmp_path / "a", instruction="do  it\n")
    bench = Bench(tmp_path, first_half)
    trained = [Task(id="original", path=tmp_path / "a", instruction="do it"), TASKS[0]]
    write_hashes(directory, {task.id: content_hash(task) for task in trained})
    bench.tasks = [copy, Task(id="original", path=tmp_path / "b", instruction="do it")]
    with pytest.raises(
        ConfigError,
        match=r"copied is training task original under another name;.* other tasks with tasks=original$",
    ):
        await bench.go(f"checkpoint={directory}")
    assert not bench.path.exists()
    # The task has the id of a training task, but another content.
    await bench.go(f"checkpoint={directory}", "tasks=original", "n_samples=1")
    assert bench.opened[-1] == "tinker://r/s/7"


async def test_two_checkpoints_are_compared_task_by_task(tmp_path):
    bench = Bench(tmp_path, lambda checkpoint, task, member: member < (1 if checkpoint is None else 3))
    await bench.go("n_samples=4", "checkpoint=tinker://r/sampler_weights/2", "compare_with=base")
    comparison = bench.results("comparison.json")
    assert (comparison["first_name"], comparison["second_name"]) == ("m", "tinker://r/sampler_weights/2")
    assert bench.opened == ["tinker://r/sampler_weights/2", None]
    assert "success 25.0% -> 75.0%, difference +50.0 points" in bench.text.getvalue()
    assert "tasks: 8 better, 0 worse; p = 0.00781 (exact sign-flip test)" in bench.text.getvalue()
    assert "mean reward" not in bench.text.getvalue()


async def test_partial_rewards_are_compared_task_by_task(tmp_path):
    partial = {None: [0.25, 0.5], "tinker://r/sampler_weights/2": [0.5, 0.75]}
    bench = Bench(tmp_path, lambda checkpoint, task, member: partial[checkpoint][member])
    await bench.go("n_samples=2", "checkpoint=tinker://r/sampler_weights/2", "compare_with=base")
    text = bench.text.getvalue()
    assert "success 0.0% -> 0.0%, " in text
    assert "mean reward 0.375 -> 0.625, difference +0.250 [+0.250, +0.250]\n" in text


def test_finished_evaluations_are_compared_without_a_server(tmp_path, capsys):
    first, second = Bench(tmp_path / "1", lambda *_: False), Bench(tmp_path / "2", first_half)
    asyncio.run(first.go("n_samples=2"))
    asyncio.run(second.go("n_samples=4", "tasks=say-00,say-01"))
    assert main([f"results={second.path}", f"compare_with={first.path}"]) == 0
    output = capsys.readouterr().out
    assert (
        "m -> m, paired over 2 tasks" in output
        and "left out: 6 tasks" in output
        and "difference +50.0 points" in output
        and "differences are the second (this evaluation) minus the first (compare_with)" in output
    )


def test_copies_of_a_task_are_compared_as_one_task(tmp_path, capsys):
    for name, solved in (("first", (2, 0)), ("second", (0, 0))):
        tasks = [{"content": "c", "solved": number, "graded": 2} for number in solved]
        (tmp_path / name).write_text(json.dumps({"evaluated": name, "tasks": tasks}))
    assert main([f"results={tmp_path / 'second'}", f"compare_with={tmp_path / 'first'}"]) == 0
    assert "success 50.0% -> 0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["modle_name=x"], "error: unknown option 'modle_name'; did you mean model_name?"),
        (
            ["model_name=m"],
            "error: missing: tasks_dir; write tasks_dir=DIRECTORY, a directory of Harbor tasks "
            "(--help lists the options)",
        ),
        (["model_name=m", "tasks_dir=t", "n_samples=0"], "error: n_samples must be at least 1, not 0"),
        (["model_name=m", "tasks_dir=t", "top_p=0"], "error: top_p must be above 0 and at most 1, not 0.0"),
        ([*SERVER, "base_url=http://h/v1", "enable_thinking=true"], THINKING),
        (["model_name=m", "tasks_dir=t", "max_turns=0"], "error: max_turns must be at least 1, not 0"),
        (
            ["model_name=m", "tasks_dir=t", "max_failure_rate=2"],
            "error: max_failure_rate must lie between 0 and 1, not 2.0",
        ),
        ([*SERVER, "base_url=http://h/v1", "checkpoint=tinker://x"], EXCLUSIVE),
        (
            [*SERVER, "base_url=http://h/v1", "compare_with=base"],
            ONE_POLICY,
        ),
        (
            [*SERVER, "base_url=http://h/v1", "compare_with=/tmp"],  # exists, but is no evaluation
            ONE_POLICY.replace("=base", "=/tmp"),
        ),
        (
            [*SERVER, "checkpoint=/no/such"],
            "error: /no/such is neither a tinker:// path nor a run directory with a checkpoint; "
            "give one of them",
        ),
        (
            [*SERVER, "checkpoint=tinker://r/weights/2"],
            "error: tinker://r/weights/2 is a training checkpoint; "
            "give its sampler checkpoint: tinker://r/sampler_weights/2",
        ),
        (["results=/no/such"], "error: missing: compare_with; e.g. compare_with=..., or --help"),
        (
            ["results=/no/such", "compare_with=/none"],
            "error: /no/such has no results.json; give the directory of an evaluation",
        ),
    ],
)
def test_a_mistake_gives_a_one_line_error(argv, line, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(argv) in (1, 2)
    assert capsys.readouterr().err == line + "\n"


def test_help_shows_the_trainers_defaults(capsys):
    assert main(["--help"]) == 0
    assert "max_tokens = 1024" in capsys.readouterr().out


def test_the_held_out_tasks_of_a_run_are_evaluated(tmp_path):
    source = FakeTasks(train=TASKS[:5], eval=TASKS[5:])
    config = parse_as(EvaluateConfig, [*SERVER, f"held_out_of={tmp_path}"])
    assert evaluated_tasks(source, config) == TASKS[5:]
    with pytest.raises(ConfigError, match="holds out no tasks; add held_out_of=none"):
        evaluated_tasks(FakeTasks(train=TASKS), config)


def test_a_rate_over_one_task_is_printed_in_the_singular():
    rate = Estimate(value=0.5, low=0.0, high=1.0, num_tasks=1)
    assert formatted_rates({"pass@1": rate}) == "pass@1: 50.0% [0.0%, 100.0%] over 1 task"
