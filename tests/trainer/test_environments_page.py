"""docs/environments.md: its worked example is run as it stands, and it names every environment there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrialFailure
from src.envs.episodes import EnvSpec, episodes
from src.envs.registry import BUILT_IN, open_task_source
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
OPTIONS = [
    "model_name=m",
    "backend=skyrl-tx",
    "skyrl_tx_url=http://h:1",
    "env=higher_lower:open_higher_lower",
]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class HigherLower" in block
    ]
    (tmp_path / "higher_lower.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_every_environment_has_a_line():
    assert all(f"`{name}`" in PAGE for name in BUILT_IN)


def test_every_way_to_fail_has_a_line_where_the_page_sends_its_reader():
    trials = (Path(__file__).resolve().parents[2] / "docs" / "trials.md").read_text()
    assert [kind for kind in FailureKind if f"`{kind}`" not in trials] == []


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("answers", "reward", "stop"),
    [
        (["5", "7", "6"], 1 / 3, StopReason.STOP),
        (["6"], 1.0, StopReason.STOP),
        (["", "six", "9"], 0.0, StopReason.MAX_TURNS),
    ],
)
async def test_the_worked_example_is_played(answers, reward, stop, tmp_path):
    chat = byte_chat()
    source = open_task_source(parse([*OPTIONS, "max_turns=4"]), chat)
    assert (len(source.train), len(source.eval)) == (8, 2)
    task = next(task for task in (*source.train, *source.eval) if task.id == "guess-6")
    policy = FakePolicy(chat, answers)
    result = await source.trial(task, directory=tmp_path, seed=1, temperature=1.0).run(policy)
    assert isinstance(result, Trajectory)
    assert (result.reward, result.stop_reason, len(policy.calls)) == (
        reward,
        stop,
        4 if stop == StopReason.MAX_TURNS else len(answers),
    )
    if reward == 1 / 3:
        hints = [message["content"] for message in result.conversation if message["role"] == "user"]
        assert (
            hints == ["Guess my number, from 0 to 9.", "Higher.", "Lower."] and result.metrics["guesses"] == 3
        )


@pytest.mark.parametrize("error", [ValueError("no board"), SystemExit("no board")])
async def test_an_environment_that_cannot_be_made_did_not_start(tmp_path, error):
    def make(task: Task, seed: int):
        raise error

    chat = byte_chat()
    tasks = [
        Task(id="a", path=Path(__file__), instruction="play"),
        Task(id="b", path=Path(__file__), instruction="again"),
    ]
    source = episodes(parse(OPTIONS), chat, EnvSpec(tasks=tasks, make=make))
    result = await source.trial(source.train[0], directory=tmp_path, seed=1, temperature=1.0).run(
        FakePolicy(chat, [])
    )
    assert isinstance(result, TrialFailure)
    assert (result.kind, result.message) == (FailureKind.ENV_INIT_FAILED, f"{type(error).__name__}: no board")
