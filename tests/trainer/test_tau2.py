"""Runs env=tau_bench with a fake worker in place of tau2-bench."""

from __future__ import annotations

import ast
import json
import logging
import stat
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.core.trajectory import StopReason, Task, Trajectory, TrialFailure, ZeroReason
from src.envs.base import TaskSource
from src.envs.registry import check_environment, open_task_source
from src.envs.service import subprocess_pool, tau2, tau2_worker, tau_bench
from src.envs.service.service_env import REFUSAL, ServiceEnv
from src.envs.service.subprocess_pool import WorkerPool
from src.envs.service.tau2_worker import JudgeError, require_verdicts
from src.envs.service.user_simulator import STOP, Tools, UserSimulator
from src.evaluate.failure_patterns import Pattern, patterns
from tests.fakes.policy import FakePolicy
from tests.fakes.tau2 import FixedJudge, tool_call_text
from tests.fakes.tokenizer import byte_chat

ROOT = Path(__file__).resolve().parents[2]
FAKE_WORKER = ROOT / "tests" / "fakes" / "fake_tau2.py"
SAVE = '<tool_call>{"name": "save", "arguments": {}}</tool_call>'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Create a directory like that of scripts/setup_tau.sh. Its Python always runs the fake worker."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {FAKE_WORKER}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "source" / "data").mkdir(parents=True)
    return tmp_path


OWN_SERVER = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1"]


def config(home: Path, *options: str, kwargs: str = "domain=retail") -> TrainerConfig:
    base = ["env=tau_bench", f"tau2_home={home}", "context_limit=8000"]
    return parse([*OWN_SERVER, *base, f"environment_kwargs={kwargs},workers=1", *options])


async def result(
    source: TaskSource, replies: Sequence[str | Exception], task: Task | None = None
) -> Trajectory | TrialFailure:
    """Run one episode and close the source."""
    trial = source.trial(task or source.train[0], directory=ROOT, seed=1, temperature=1.0)
    try:
        return await trial.run(FakePolicy(byte_chat(), replies))
    finally:
        await source.close()


async def graded(
    home: Path, replies: Sequence[str | Exception], *, kwargs: str = "domain=retail"
) -> Trajectory:
    outcome = await result(open_task_source(config(home, kwargs=kwargs), byte_chat()), replies)
    assert isinstance(outcome, Trajectory), outcome
    return outcome


@pytest.mark.seed_behaviour(57)
async def test_an_episode_reaches_the_official_evaluator(home: Path):
    trajectory = await graded(home, [SAVE, "It is saved."])
    assert (trajectory.reward, trajectory.stop_reason, len(trajectory.turns)) == (1.0, StopReason.STOP, 8)
    roles = [message["role"] for message in trajectory.conversation]
    assert roles[:6] == ["system", "assistant", "user", "assistant", "tool", "assistant"]
    # The scripted user states its scenario in its first message.
    assert trajectory.conversation[2]["content"] == "save it"
    assert trajectory.metrics["reward_all"] == trajectory.metrics["reward_db"] == 1.0
    assert trajectory.metrics["no_write_action"] == trajectory.metrics["user_tool_errors"] == 0.0
    assert trajectory.conversation[-1] == {"role": "user", "content": f"Thanks. {STOP}"}


async def test_refusing_everything_gives_the_noop_reward(home: Path):
    trajectory = await graded(home, [REFUSAL])
    assert (trajectory.reward, trajectory.metrics["no_write_action"]) == (0.0, 1.0)
    assert patterns(trajectory) == {Pattern.NOTHING_DONE}
    source = open_task_source(config(home), byte_chat())
    assert await source.noop_reward(source.train[0]) == 0.0
    await source.close()


async def test_partial_grading_has_its_own_metric_name_and_no_judge(home: Path):
    trajectory = await graded(home, [SAVE, "Saved."], kwargs="domain=retail,grading=env")
    assert trajectory.metrics["reward_env"] == 1.0 and "reward_all" not in trajectory.metrics
    source = open_task_source(config(home, kwargs="domain=retail,grading=env"), byte_chat())
    assert [task.id for task in source.train] == [
        "retail/save-train",
        "retail/judged-train",
        "retail/broken-train",
    ]
    assert [task.id for task in source.eval] == [
        "retail/save-test",
        "retail/judged-test",
        "retail/broken-test",
    ]
    assert {(task.grading, task.has_writes) for task in source.eval} == {("env", True), ("env", False)}
    assert {task.grading for task in open_task_source(config(home), byte_chat()).train} == {""}


def test_tasks_that_need_a_missing_judge_are_skipped_and_counted(
    home: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        source = open_task_source(config(home), byte_chat())
    assert [task.id for task in source.train] == ["retail/save-train", "retail/broken-train"]
    assert "1 of 3 tasks need a judge (judge_model, judge_base_url) and are skipped" in caplog.text


@pytest.mark.parametrize("changes", [{"reasoning": None}, {"expectedOutcome": 1}, {"metExpectation": "yes"}])
def test_a_verdict_with_a_value_of_another_type_is_refused(changes: dict[str, object]):
    verdict = {"expectedOutcome": "x", "reasoning": "y", "metExpectation": True}
    require_verdicts(json.dumps({"results": [verdict]}), num_assertions=1)
    with pytest.raises(JudgeError, match="has 1 verdicts, of which 0 are valid"):
        require_verdicts(json.dumps({"results": [verdict | changes]}), num_assertions=1)


@pytest.mark.parametrize(("answer", "reward"), [("yes", 1.0), ("garbage", None)])
async def test_an_invalid_judge_reply_is_a_failure_and_not_a_reward(
    home: Path, answer: str, reward: float | None
):
    judge = FixedJudge(answer)
    settings = tau2.worker_settings(home, num_workers=1, step_timeout_s=20)
    task = next(task for task in tau2.official_tasks(settings, "retail", "train") if task.row["needs_judge"])
    pool = WorkerPool(settings)
    context = tau2.Tau2Context(pool=pool, make_user=tau2.scripted_user, grading="all", judge=judge)
    source = tau_bench.episodes(
        config(home, "eval_split=0"),
        byte_chat(),
        tau_bench.EnvSpec(
            tasks=[task],
            make=lambda task, seed: ServiceEnv(tau2.Tau2Episode(task, seed, context)),
            close=pool.aclose,
        ),
    )
    outcome = await result(source, [SAVE, "Saved."])
    assert judge.requests == [[{"role": "user", "content": "was it polite?"}]]
    if reward is None:
        assert isinstance(outcome, TrialFailure) and "JudgeError" in outcome.message
    else:
        assert isinstance(outcome, Trajectory) and outcome.reward == reward


async def test_a_call_that_times_out_ends_the_episode_with_reward_0(home: Path):
    trajectory = await graded(home, [tool_call_text("calculate", expression="9**9**9")])
    assert (trajectory.reward, trajectory.stop_reason) == (0.0, StopReason.TIMEOUT)
    assert trajectory.metrics["tool_timeouts"] == 1.0


async def test_a_call_that_ends_its_worker_and_the_next_has_reward_0(home: Path):
    outcome = await result(open_task_source(config(home), byte_chat()), [tool_call_text("die")])
    assert isinstance(outcome, Trajectory) and (outcome.reward, outcome.zero_reason) == (
        0.0,
        ZeroReason.ENV_ERROR,
    )


async def test_an_evaluation_error_gives_reward_0_and_is_counted(home: Path):
    source = open_task_source(config(home), byte_chat())
    outcome = await result(
        source, [SAVE, "Saved."], next(task for task in source.train if "broken" in task.id)
    )
    assert isinstance(outcome, Trajectory) and (outcome.reward, outcome.metrics["eval_errors"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "count", "reward"),
    [
        ("", "unusable_answers", 0.0),
        ('{"name": "save", "arguments": {"a', "parse_failures", 0.0),
        (tool_call_text("fly"), "tool_errors", 0.0),
    ],
)
async def test_ten_useless_answers_end_an_episode(home: Path, answer: str, count: str, reward: float):
    trajectory = await graded(home, [answer])
    assert (trajectory.reward, trajectory.metrics[count]) == (reward, 10.0)


@pytest.mark.parametrize(
    ("kwargs", "num_saved"), [("domain=retail", 1), ("domain=retail,parallel_tool_calls=true", 2)]
)
async def test_parallel_tool_calls_selects_one_or_all_calls(home: Path, kwargs: str, num_saved: int):
    trajectory = await graded(home, [SAVE + SAVE, "Saved."], kwargs=kwargs)
    assert sum(message["role"] == "tool" for message in trajectory.conversation) == num_saved


class ToolCallingUser:
    """A user that calls a tool of its own before its first message."""

    def __init__(self) -> None:
        self.conversations: list[list[object]] = []

    async def reply(self, conversation: Sequence[object]) -> str:
        self.conversations.append(list(conversation))
        replies = [tool_call_text("look", at="the phone"), "It says saved.", f"Bye {STOP}"]
        return replies[len(self.conversations) - 1]


async def test_the_agent_does_not_see_tool_calls_of_the_user(home: Path):
    user = ToolCallingUser()
    settings = tau2.worker_settings(home, num_workers=1, step_timeout_s=20)
    pool = WorkerPool(settings)

    def make_user(instructions: str, tools: Tools, seed: int) -> UserSimulator:
        assert instructions.startswith("guidelines") and seed == 7
        return user

    task = tau2.official_tasks(settings, "retail", "train")[0]
    env = ServiceEnv(
        tau2.Tau2Episode(task, 7, tau2.Tau2Context(pool=pool, make_user=make_user, grading="all"))
    )
    opening = await env.start()
    assert [message["content"] for message in opening.messages[1:]] == [
        "Hi! How can I help you today?",
        "It says saved.",
    ]
    assert (await env.step("Bye")).is_done
    await env.close()
    await pool.aclose()
    assert [message["role"] for message in user.conversations[1]] == ["assistant", "user", "tool"]  # type: ignore[index]
    assert user.conversations[1][2]["content"] == "saw {'at': 'the phone'}"  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "kwargs", "message"),
    [
        ([], "domain=retial", "domain=retial is not one of toy_retail, retail, airline, telecom, mock"),
        ([], "domain=retail+shoes", "environment_kwargs: domain=shoes is not one of toy_retail"),
        ([], "domain=retail,grading=half", "grading=half is not one of all, env"),
        ([], "domain=retail,speed=3", "domain=retail has no option speed"),
        ([], "domain=retail,step_timeout_s=soon", "step_timeout_s must be a number above 0, not 'soon'"),
        ([], "domain=retail,step_timeout_s=nan", "step_timeout_s must be a number above 0, not 'nan'"),
        (
            [],
            "domain=retail,user_simulator=openai",
            "user_simulator=openai needs user_model=NAME and user_base_url",
        ),
        ([], "domain=telecom", "tau2 cannot list the train tasks of telecom: FileNotFoundError"),
        (["tasks_dir=x"], "domain=retail", "tasks_dir cannot be used with domain=retail"),
        (
            ["tau2_home=/nowhere"],
            "domain=retail",
            "/nowhere contains no tau2-bench; run scripts/setup_tau.sh",
        ),
        (["tau2_home=None"], "domain=retail", "needs tau2-bench: run scripts/setup_tau.sh"),
    ],
)
def test_invalid_options_are_rejected_with_one_line(
    home: Path, options: list[str], kwargs: str, message: str
):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        open_task_source(config(home, *options, kwargs=kwargs), byte_chat())


@pytest.mark.parametrize(
    ("options", "kwargs", "message"),
    [
        ([], "domain=retial", "domain=retial is not one of toy_retail, retail, airline, telecom, mock"),
        (["tau2_home=None"], "domain=retail", "needs tau2-bench: run scripts/setup_tau.sh"),
    ],
)
def test_a_domain_is_checked_before_the_run_connects(
    home: Path, options: list[str], kwargs: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        check_environment(config(home, *options, kwargs=kwargs))


def test_the_error_of_a_killed_listing_names_its_status(home: Path):
    (home / "venv" / "bin" / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(
        ConfigError, match="the train tasks of retail: its worker ended with status -9; check"
    ):
        open_task_source(config(home), byte_chat())


def test_several_domains_are_trained_on_together(home: Path):
    source = open_task_source(config(home, kwargs="domain=retail+airline+mock"), byte_chat())
    assert [task.domain for task in source.train] == ["retail"] * 2 + ["airline"] * 2 + ["mock"] * 2
    assert {task.domain for task in source.eval} == {"retail", "airline"}


def test_the_unrelated_tau2_package_is_not_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert not [name for name in dependencies if name.startswith(("tau2", "tau-bench"))]
    assert "tau2" not in (ROOT / "requirements.txt").read_text()


def test_the_worker_imports_only_tau2_and_the_standard_library():
    tree = ast.parse(Path(tau2_worker.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"tau2", "loguru"}


async def test_the_worker_rejects_an_unrelated_tau2_package(tmp_path: Path):
    """The package tau2 on PyPI, like the empty package of this test, has no module `registry`."""
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("")
    (tmp_path / "loguru.py").write_text("class logger:\n    remove = staticmethod(lambda: None)\n")
    command = [sys.executable, str(tau2_worker.__file__), "4096"]
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = {command[1:]!r}; import runpy; "
    settings = subprocess_pool.WorkerSettings(
        command=[
            sys.executable,
            "-I",
            "-c",
            program + f"runpy.run_path({command[1]!r}, run_name='__main__')",
        ],
        environment={},
        num_workers=1,
        step_timeout_s=5,
    )
    with pytest.raises(
        ConfigError,
        match=r"has no tau2 of sierra-research/tau2-bench \(PyPI's tau2 is an unrelated package\)",
    ):
        await subprocess_pool.start_worker(settings)


def test_a_gold_action_has_the_arguments_of_its_tool():
    tools = {"save": {"properties": {"name": {}, "note": {}}, "required": ["name"]}, "look": {}}
    parameters = r"mine: save has the parameters name, note \(required: name\)"
    for action in ({"name": "save", "arguments": {"name": "a"}}, {"name": "look", "arguments": {}}):
        tau2_worker.require_callable(action, tools, task="mine")
    for arguments, shown in (
        ({}, "no arguments"),
        ({"name": "a", "colour": None}, "the arguments name, colour"),
    ):
        with pytest.raises(ValueError, match=f"^{parameters}, but the gold action has {shown}$"):
            tau2_worker.require_callable({"name": "save", "arguments": arguments}, tools, task="mine")
    with pytest.raises(ValueError, match=r"^mine: look has no parameters, but the gold action has the arg"):
        tau2_worker.require_callable({"name": "look", "arguments": {"at": "it"}}, tools, task="mine")


def test_former_option_names_are_accepted_with_a_notice(caplog: pytest.LogCaptureFixture):
    former = parse([*OWN_SERVER, "env=tau_bench", "environment_kwargs=customer=openai"])
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="user_simulator=openai needs"):
        check_environment(former)
    assert "customer is a former name; use user_simulator" in caplog.text
