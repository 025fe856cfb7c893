"""Tests service domains of users: the example of a clinic, its recipe, rows of files, and registration."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from examples.healthcare import database
from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.core.trajectory import Task, Trajectory
from src.envs.base import TaskSource
from src.envs.registry import open_task_source
from tests.fakes.policy import FakePolicy
from tests.fakes.run import OWN_SERVER
from tests.fakes.tokenizer import byte_chat

ROOT = Path(__file__).resolve().parents[2]
RECIPE = [
    line for line in (ROOT / "examples" / "healthcare.args").read_text().splitlines() if line[:1] != "#"
]
DOMAIN = "environment_kwargs=domain=examples.healthcare:open_healthcare"
CANCEL = '{"name": "cancel_appointment", "arguments": {"appointment": "A0"}}'


def opened(*options: str) -> TaskSource:
    return open_task_source(
        parse([*OWN_SERVER, "env=tau_bench", "context_limit=8000", *options]), byte_chat()
    )


def task_of(source: TaskSource, task_id: str) -> Task:
    return next(task for task in (*source.train, *source.eval) if task.id == task_id)


async def reward(source: TaskSource, task_id: str, *answers: str) -> float:
    trial = source.trial(task_of(source, task_id), directory=ROOT, seed=1, temperature=1.0)
    result = await trial.run(FakePolicy(byte_chat(), answers))
    assert isinstance(result, Trajectory), result
    return result.reward


@pytest.mark.seed_behaviour(106)
async def test_the_recipe_opens_and_grades_the_domain():
    source = open_task_source(parse([*OWN_SERVER, *RECIPE]), byte_chat())
    assert (len(source.train), len(source.eval)) == (12, 6)
    assert {task.domain for task in (*source.train, *source.eval)} == {"healthcare"}
    assert await reward(source, "healthcare/cancel-0", CANCEL, "Done.") == 1.0
    assert await reward(source, "healthcare/cancel-0", "Done.") == 0.0
    day = database()["appointments"]["A1"]["day"]
    assert await reward(source, "healthcare/ask-1", f"It is on {day}.") == 1.0
    assert await source.noop_reward(task_of(source, "healthcare/move-5")) == 0.0
    await source.close()


@pytest.mark.seed_behaviour(106)
async def test_rows_define_and_name_tasks_of_the_domain(tmp_path: Path):
    info = {
        "domain": "healthcare",
        "task_id": "mine",
        "instruction": "Cancel A0.",
        "actions": [json.loads(CANCEL)],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"extra_info": info}) + "\n")
    source = opened(DOMAIN, f"train_data={path}", "test_data=clinic=healthcare:test")
    assert len(source.train) == 13 and {task.domain for task in source.eval} == {"clinic"}
    assert await reward(source, "healthcare/mine", CANCEL, "Done.") == 1.0


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the metadata of a package that registers the domain."""
    package = tmp_path / "clinic-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: clinic\nVersion: 1.0\n")
    names = ("healthcare", "clinic")
    lines = "".join(f"{name} = examples.healthcare:open_healthcare\n" for name in names)
    (package / "entry_points.txt").write_text(f"[agent_trainer.service_domains]\n{lines}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("installed_package")
@pytest.mark.seed_behaviour(106)
def test_a_registered_domain_is_known_by_its_name(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"extra_info": {"domain": "healthcare", "task_id": "ask-0"}}) + "\n")
    assert len(opened("environment_kwargs=domain=healthcare+toy_retail").train) > 12
    source = opened(f"train_data={path}", "test_data=healthcare:test")
    assert [task.id for task in source.train] == ["healthcare/ask-0"] and len(source.eval) == 6


@pytest.mark.usefixtures("installed_package")
@pytest.mark.parametrize("option", ["train_data=clinic:train", "environment_kwargs=domain=clinic"])
def test_an_entry_point_has_the_name_of_its_domain(option: str):
    with pytest.raises(ConfigError, match="domain=clinic returned a domain with the name healthcare; rename"):
        opened(option)


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("clinic", "environment_kwargs: domain=clinic is not one of toy_retail, retail"),
        ("no_module:f", "environment_kwargs domain=no_module:f: cannot import no_module"),
        ("json:loads", "domain=json:loads: TypeError: "),
        ("pathlib:Path", "domain=pathlib:Path: TypeError: "),
        ("tests.trainer.test_service_domains:opened_nothing", "returned NoneType; return a ServiceDomain"),
        ("examples.healthcare:open_healthcare,speed=2", "domain=healthcare has no option speed; remove it"),
    ],
)
def test_a_mistake_in_a_domain_gives_a_one_line_error(domain, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        opened(f"environment_kwargs=domain={domain}")
    assert "\n" not in str(refused.value)


def opened_nothing(context: object) -> None:
    """A function that opens no domain."""
