"""Tests `python -m src.envs.try_env`, which prints trials of scripted, typed and model policies."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from src.cli.command_line import parse_as
from src.core import wait_notice
from src.core.errors import ConfigError
from src.core.trajectory import FailureKind, Task, Trajectory, TrialFailure, Turn
from src.envs import try_env
from src.envs.base import run_trial
from src.envs.try_env import TryConfig
from src.policy.sampling_policy import SampleRequest
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]

# The trial of task a ends after those of b and c.
LATE_ENV = """
import asyncio
from src.core.trajectory import Task
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import ResetResult, StepResult

ended = set()
others_have_ended = asyncio.Event()

class Env:
    def __init__(self, task, seed):
        self.id = task.id

    async def start(self):
        return ResetResult(messages=[{"role": "user", "content": "hello"}])

    async def step(self, answer):
        if self.id == "a":
            await others_have_ended.wait()
        return StepResult(reward=1.0, is_done=True)

    async def close(self):
        ended.add(self.id)
        if ended >= {"b", "c"}:
            others_have_ended.set()

def open_env(config, chat):
    tasks = [Task(id=name, path=__file__) for name in "abc"]
    return episodes(config, chat, EnvSpec(tasks=tasks, make=Env))
"""


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"data={path}"


async def run_try_env(*options: str) -> tuple[str, int]:
    """Return the output and the exit status."""
    text, statuses = io.StringIO(), list[int]()
    await try_env.run(parse_as(TryConfig, options), Console(file=text, width=100), statuses)
    return text.getvalue(), statuses[0]


async def test_reference_answers_have_the_full_reward(data: str):
    text, status = await run_try_env(data, "reward=number", "policy=scripted", "n_tasks=2", "n_samples=2")
    assert "pass rate (scripted): 100.0% (4/4 trials)" in text and status == 0
    assert text.count("user: 0+1?") == 2 and "sums-00001, trial 2: reward 1" in text


async def test_scripted_answers_come_from_a_file(data: str, tmp_path: Path):
    (tmp_path / "answers.txt").write_text("wrong\n2\n")
    options = (f"answers={tmp_path / 'answers.txt'}", "tasks=sums-00002,sums-00003")
    text, _ = await run_try_env(data, "reward=number", "environment_kwargs=max_answers=2", *options)
    assert (
        "pass rate (scripted): 50.0% (1/2 trials)" in text and "user: That is not correct. Try again." in text
    )


async def test_typed_answers_are_read_from_the_terminal(data: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n5\n"))
    text, _ = await run_try_env(data, "reward=number", "policy=typed")
    assert text.index("user: 0+1?") < text.index("sums-00001, trial 1: reward 1") < text.index("user: 1+1?")
    assert "backend: standard input ended before the trial" in text
    assert "pass rate (typed): 50.0% (1/2 trials)" in text


@pytest.mark.parametrize("policy", ["scripted", "typed"])
async def test_earlier_answers_of_a_question_are_shown_and_not_counted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
):
    turns = [("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    (tmp_path / "sums.jsonl").write_text(json.dumps({"messages": messages, "answer": "4"}))
    (tmp_path / "answers.txt").write_text("4\n5\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("4\n"))
    answers = [f"answers={tmp_path / 'answers.txt'}"] if policy == "scripted" else ["policy=typed"]
    text, _ = await run_try_env(f"data={tmp_path / 'sums.jsonl'}", "reward=number", *answers)
    assert "user: 1+1?" in text and "trial 1: reward 1" in text


async def test_a_task_id_is_not_parsed_as_markup(tmp_path: Path):
    (tmp_path / "sums.jsonl").write_text('{"id": "x[/red]", "question": "1+1?", "answer": "2"}\n')
    text, _ = await run_try_env(f"data={tmp_path / 'sums.jsonl'}", "reward=number", "policy=scripted")
    assert "x[/red], trial 1: reward 1" in text and "x[/red]  1/1" in text


def unwrapped(text: str) -> str:
    """Return the text without the spaces, line ends and borders by which the console wraps long lines."""
    return "".join(text.replace("│", "").split())


async def test_the_pass_rate_of_a_model_is_printed(data: str, monkeypatch: pytest.MonkeyPatch):
    async def model(config, stack):
        return FakePolicy(byte_chat(), ["1", "2", "3"]), byte_chat()

    monkeypatch.setattr(try_env, "model", model)
    text, _ = await run_try_env(
        data, "reward=number", "model_name=m", "base_url=http://h:1/v1", "n_samples=3", "n_tasks=1"
    )
    assert "pass rate (model): 33.3% (1/3 trials)" in text
    assert "tasks whose trials have different rewards, from which GRPO learns: 1 of 1" in text


async def test_a_wait_for_the_first_trial_is_explained(data: str, monkeypatch: pytest.MonkeyPatch):
    class SlowPolicy(FakePolicy):
        async def sample(self, request: SampleRequest) -> Turn:
            for _ in range(5):  # iterations of the event loop, during which the notice becomes due
                await asyncio.sleep(0)
            return await super().sample(request)

    async def model(config, stack):
        return SlowPolicy(byte_chat(), ["1"]), byte_chat()

    monkeypatch.setattr(try_env, "model", model)
    monkeypatch.setattr(wait_notice, "SLOW_S", 0.0)
    server = ("model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1")
    text, _ = await run_try_env(data, "reward=number", "policy=model", *server, "n_tasks=1")
    assert text.startswith("waiting for the first trial; the server may compile its programs\n")


async def test_the_mean_of_partial_rewards_is_printed(data: str, tmp_path: Path, monkeypatch):
    (tmp_path / "part.py").write_text("def grade(answer, row):\n    return 0.25 * int(answer)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text, _ = await run_try_env(data, "reward=part:grade", "policy=scripted", "n_tasks=4")
    assert "mean reward: 0.625\npass rate (scripted): 25.0% (1/4 trials)" in text


async def test_trials_are_printed_in_the_order_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "late_env.py").write_text(LATE_ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "answers.txt").write_text("hello\n")
    text, _ = await run_try_env("env=late_env:open_env", f"answers={tmp_path / 'answers.txt'}")
    assert re.findall(r"(\w), trial 1: reward 1", text) == ["a", "b", "c"]


async def test_the_failure_of_a_reward_function_is_shown(data: str, tmp_path: Path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text("def grade(answer, row):\n    return row['nothing']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text, status = await run_try_env(data, "reward=bad_reward:grade", "policy=scripted", "n_tasks=1")
    assert "env_error: KeyError: 'nothing'" in text
    assert "bad_reward.py:2ingrade)" in unwrapped(text)
    assert status == 1


async def test_trials_without_a_grade_give_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "torn_env.py").write_text(
        "from src.core.trajectory import Task\nfrom src.envs.episodes import EnvSpec, episodes\n"
        "def make(task, seed):\n    raise RuntimeError('no board')\n"
        "def open_env(config, chat):\n"
        "    return episodes(config, chat, EnvSpec(tasks=[Task(id='a', path=__file__)], make=make))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "answers.txt").write_text("hello\n")
    text, status = await run_try_env("env=torn_env:open_env", f"answers={tmp_path / 'answers.txt'}")
    assert "env_init_failed: RuntimeError: no board" in text and "torn_env.py:4" in unwrapped(text)
    assert "no trial could be graded" in text and status == 1


async def test_a_trial_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "slow_env.py").write_text(LATE_ENV.replace('ended >= {"b", "c"}', "False"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "answers.txt").write_text("hello\n")
    text, status = await run_try_env(
        "env=slow_env:open_env", f"answers={tmp_path / 'answers.txt'}", "trial_timeout_s=0.2"
    )
    assert "timeout: not finished after 0.2 s" in text and "(2/2 trials)" in text and status == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["env=tau_bench", "policy=scripted"], "policy=scripted needs answers=FILE with one answer per line"),
        (["env=tau_bench", "answers=no.txt"], "answers=no.txt cannot be read"),
        (
            ["env=tau_bench", "policy=typed", "answers=a"],
            "answers is for policy=scripted, but the policy is typed",
        ),
        (["env=tau_bench", "n_tasks=0"], "n_tasks must be at least 1, not 0"),
        (["env=tau_bench", "policy=model"], "missing: model_name"),
        (["env=tau_bench", "policy=typed", "checkpoint=a"], "checkpoint is for policy=model"),
        (["data=no.jsonl"], "missing: reward; write reward=exact"),
    ],
)
async def test_a_mistake_gives_a_one_line_error(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        await run_try_env(*options)


class CancellingTrial:
    """A trial that raises CancelledError although nobody cancels it, or (`does_end=False`) that waits until
    it is cancelled."""

    def __init__(self, *, does_end: bool) -> None:
        self.was_cancelled = False
        self._does_end = does_end

    async def run(self, policy: object) -> Trajectory | TrialFailure:
        if self._does_end:
            raise asyncio.CancelledError
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        raise AssertionError("unreachable")


async def test_a_trial_that_is_cancelled_from_inside_is_a_failure():
    task = Task(id="a", path=Path("a"), instruction="i")
    trial = CancellingTrial(does_end=True)
    result = await run_trial(lambda: trial, FakePolicy(byte_chat(), []), task, timeout_s=60)
    assert isinstance(result, TrialFailure) and result.kind is FailureKind.HARBOR


async def test_a_trial_is_cancelled_at_its_deadline():
    task, trial = Task(id="a", path=Path("a"), instruction="i"), CancellingTrial(does_end=False)
    result = await run_trial(lambda: trial, FakePolicy(byte_chat(), []), task, timeout_s=0.01)
    assert isinstance(result, TrialFailure) and result.kind is FailureKind.TIMEOUT
    assert trial.was_cancelled
