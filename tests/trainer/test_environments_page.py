"""Tests that docs/environments.md lists every built-in environment and that its files work unchanged.

docs/trials.md, to which the page refers, must list every failure kind and every graded-zero reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.core.trajectory import FailureKind, StopReason, Trajectory, ZeroReason
from src.envs.base import TaskSource
from src.envs.registry import BUILT_IN, open_task_source
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.validate import main as validate
from src.policy.chat import Chat
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
TRIALS_PAGE = (ROOT / "docs" / "trials.md").read_text()
# The content of each code block with a title, by the title, which is a file name.
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
HARBOR_FILES = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh")
NO_SANDBOX = why_no_sandbox()
OPTIONS = [
    "model_name=m",
    "backend=skyrl-tx",
    "skyrl_tx_url=http://h:1",
    "env=higher_lower:open_higher_lower",
    "max_turns=4",
]


@pytest.fixture
def chat() -> Chat:
    return byte_chat()


@pytest.fixture
def higher_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: Chat) -> TaskSource:
    (tmp_path / "higher_lower.py").write_text(FILES["higher_lower.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    return open_task_source(parse(OPTIONS), chat)


async def run_trial(source: TaskSource, policy: FakePolicy, directory: Path) -> Trajectory:
    """Run a trial of the task whose secret number is 6."""
    task = next(task for task in (*source.train, *source.eval) if task.id == "guess-6")
    result = await source.trial(task, directory=directory, seed=1, temperature=1.0).run(policy)
    assert isinstance(result, Trajectory)
    return result


def test_the_page_lists_every_built_in_environment():
    assert [name for name in BUILT_IN if f"| `{name}`" not in PAGE] == []


@pytest.mark.parametrize("reason", [*FailureKind, *ZeroReason])
def test_trials_md_lists_every_failure_and_graded_zero_reason(reason):
    assert re.search(rf"^\|.*`{reason}`.*\|", TRIALS_PAGE, re.MULTILINE)


def test_the_message_environment_has_held_out_tasks(higher_lower):
    assert (len(higher_lower.train), len(higher_lower.eval)) == (8, 2)


@pytest.mark.parametrize(
    ("answers", "reward", "stop_reason"),
    [
        (["5", "7", "6"], 1 / 3, StopReason.STOP),
        (["6"], 1.0, StopReason.STOP),
        (["", "six", "9"], 0.0, StopReason.MAX_TURNS),
    ],
)
async def test_the_message_environment_is_graded(answers, reward, stop_reason, higher_lower, chat, tmp_path):
    result = await run_trial(higher_lower, FakePolicy(chat, answers), tmp_path)
    assert (result.reward, result.stop_reason) == (reward, stop_reason)


async def test_the_message_environment_gives_hints(higher_lower, chat, tmp_path):
    result = await run_trial(higher_lower, FakePolicy(chat, ["5", "7", "6"]), tmp_path)
    hints = [message["content"] for message in result.conversation if message["role"] == "user"]
    assert hints == ["Guess my number, from 0 to 9.", "Higher.", "Lower."]


async def test_the_message_environment_reports_metrics(higher_lower, chat, tmp_path):
    result = await run_trial(higher_lower, FakePolicy(chat, ["5", "7", "6"]), tmp_path)
    assert result.metrics["guesses"] == 3


async def test_the_reward_function_grades(tmp_path, monkeypatch, chat):
    (tmp_path / "short_answers.py").write_text(FILES["short_answers.py"])
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}')
    monkeypatch.syspath_prepend(str(tmp_path))
    options = [f"data={tmp_path / 'a.jsonl'}", "reward=short_answers:short_and_right"]
    source = open_task_source(parse([*OPTIONS[:3], *options]), chat)
    trial = source.trial(source.train[0], directory=tmp_path, seed=1, temperature=1.0)
    result = await trial.run(FakePolicy(chat, ["It is 2"]))
    assert isinstance(result, Trajectory)
    assert (result.reward, result.metrics["characters"]) == (pytest.approx(1.1), 7)


@pytest.mark.skipif(NO_SANDBOX is not None, reason=f"no sandbox here: {NO_SANDBOX}")
def test_the_harbor_task_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in HARBOR_FILES:
        path = tmp_path / "tasks" / "count-errors" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name])
    monkeypatch.chdir(tmp_path)
    [options] = re.findall(r"-m src\.envs\.validate (.*)$", PAGE, re.MULTILINE)
    [line] = re.findall(r"`(ok   count-errors: .*?)`", PAGE)
    assert validate([*options.split(), "environment_type=sandbox"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line
