"""Tests task files, splits and mixtures of several domains."""

from __future__ import annotations

import json
import stat
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import chz
import pyarrow
import pyarrow.parquet
import pytest

from src.cli.command_line import parse, parse_as
from src.core.errors import ConfigError
from src.core.trajectory import Task, Trajectory
from src.envs.base import TaskSource
from src.envs.data.records import without_nulls
from src.envs.registry import open_task_source
from src.envs.service.task_files import Row, TaskDefinition, read_rows
from src.envs.service.toy_retail import DIRECTORY
from src.evaluate.config import EvaluateConfig
from src.rollouts.options import ScheduleOptions
from src.rollouts.pipeline import schedule
from tests.fakes.policy import FakePolicy
from tests.fakes.tokenizer import byte_chat

ROOT = Path(__file__).resolve().parents[2]
ORDER = next(iter(json.loads((DIRECTORY / "db.json").read_text())["orders"]))
CANCEL = {"name": "cancel_order", "kwargs": {"order": ORDER}}


def row(domain: str, task: str | None = None, **info: object) -> dict[str, object]:
    extra_info = {"domain": domain, **info} | ({} if task is None else {"task_id": task})
    return {
        "data_source": f"tau_bench/{domain}",
        "env_class": "tau_bench",
        "prompt": [{"role": "user", "content": "-"}],
        "extra_info": extra_info,
    }


def write_json_lines(path: Path, *rows: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


@pytest.fixture
def tau2_home(tmp_path: Path) -> Path:
    """Create a tau2_home directory with a fake tau2 worker."""
    python = tmp_path / "tau2" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT / 'tests' / 'fakes' / 'fake_tau2.py'}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "tau2" / "source" / "data").mkdir(parents=True)
    return tmp_path / "tau2"


def open_source(*options: str) -> TaskSource:
    base = [
        "model_name=m",
        "backend=skyrl-tx",
        "skyrl_tx_url=http://h:1",
        "env=tau_bench",
        "context_limit=8000",
    ]
    return open_task_source(parse([*base, *options]), byte_chat())


def ids_of(tasks: object) -> list[str]:
    assert isinstance(tasks, list)
    return [task.id for task in tasks]


async def reward(source: TaskSource, task: Task, *answers: str) -> float:
    result = await source.trial(task, directory=ROOT, seed=1, temperature=1.0).run(
        FakePolicy(byte_chat(), answers)
    )
    assert isinstance(result, Trajectory), result
    return result.reward


@pytest.mark.seed_behaviour(20)
def test_a_row_defines_a_task_or_names_one(tmp_path: Path):
    path = write_json_lines(
        tmp_path / "rows.jsonl",
        row("retail", "7"),
        {"data_source": "tau_bench/airline", "extra_info": {"index": 3}},
        row("retail", "8", instruction="You want it.", actions=[CANCEL], outputs=["12"]),
        row("retail", instruction="You want it.", actions="[]"),
        {
            **row("retail", "9", instruction="You want it."),
            "reward_spec": {"ground_truth": json.dumps([CANCEL])},
        },
    )
    rows = read_rows(path)
    gold_action = {"name": "cancel_order", "arguments": {"order": ORDER}}
    assert rows[:3] == [
        Row(domain="retail", task="7", definition=None),
        Row(domain="airline", task="3", definition=None),
        Row(
            domain="retail",
            task="8",
            definition=TaskDefinition(instruction="You want it.", actions=[gold_action], facts=["12"]),
        ),
    ]
    assert (
        rows[3].definition == TaskDefinition(instruction="You want it.", actions=[], facts=[])
        and len(rows[3].task) == 12
    )
    assert rows[4].definition is not None and rows[4].definition.actions == [gold_action]


@pytest.mark.seed_behaviour(15)
async def test_rows_of_two_domains_run_in_their_own_domains(tmp_path: Path, tau2_home: Path):
    train = write_json_lines(
        tmp_path / "train.jsonl",
        row("toy_retail", "mine", instruction=f"Please cancel order {ORDER}.", actions=[CANCEL]),
        row("retail", "save-train"),
        row("retail", "new", instruction="keep it", actions=[{"name": "save", "arguments": {}}]),
    )
    test = write_json_lines(tmp_path / "test.jsonl", row("toy_retail", "cancel-train-1"))
    source = open_source(
        f"train_data={train}",
        f"test_data=shop={test},airline:test",
        f"tau2_home={tau2_home}",
        "environment_kwargs=workers=1",
    )
    assert ids_of(source.train) == ["mine", "retail/save-train", "retail/new"]
    assert [(task.id, task.domain) for task in source.eval] == [
        ("cancel-train-1", "shop"),
        ("airline/save-test", "airline"),
        ("airline/broken-test", "airline"),
    ]
    call = json.dumps({"name": "cancel_order", "arguments": {"order": ORDER}})
    assert await reward(source, source.train[0], f"<tool_call>{call}</tool_call>", "Done.") == 1.0
    trial = source.trial(source.train[2], directory=ROOT, seed=1, temperature=1.0)
    result = await trial.run(
        FakePolicy(byte_chat(), ['<tool_call>{"name": "save", "arguments": {}}</tool_call>', "Saved."])
    )
    assert isinstance(result, Trajectory) and result.reward == 1.0
    assert result.conversation[2]["content"] == "keep it"  # the instruction is the scenario of the user
    await source.close()


def test_files_add_training_tasks_and_replace_held_out_tasks(tmp_path: Path):
    mine = write_json_lines(
        tmp_path / "mine.jsonl", row("toy_retail", "mine", instruction="Hello.", actions=[])
    )
    source = open_source(
        "environment_kwargs=domain=toy_retail", f"train_data={mine}", "test_data=held=toy_retail:test"
    )
    assert (len(source.train), source.train[-1].id, len(source.eval)) == (41, "mine", 20)
    assert {task.domain for task in source.eval} == {"held"}


def test_an_evaluation_uses_only_its_test_data():
    argv = [
        "model_name=m",
        "env=tau_bench",
        "test_data=held=toy_retail:test",
        "backend=skyrl-tx",
        "skyrl_tx_url=http://h:1",
    ]
    source = open_task_source(
        parse_as(EvaluateConfig, [*argv, "context_limit=8000"]).environment, byte_chat()
    )
    assert (list(source.train), len(source.eval)) == ([], 20)


def test_a_partial_grading_applies_only_to_tau2_tasks(tau2_home: Path):
    source = open_source(
        "environment_kwargs=domain=retail+toy_retail,grading=env,workers=1", f"tau2_home={tau2_home}"
    )
    assert {(task.domain, task.grading) for task in source.train} == {("retail", "env"), ("toy_retail", "")}
    assert {task.has_writes for task in source.train if task.domain == "toy_retail"} == {True, False}


@pytest.mark.seed_behaviour(21)
def test_a_task_in_both_training_and_test_data_is_rejected(tmp_path: Path, tau2_home: Path):
    repeated_task_file = write_json_lines(tmp_path / "again.jsonl", row("retail", "save-train"))
    with pytest.raises(
        ConfigError,
        match="held-out tasks are also training tasks: retail/save-train; "
        "remove them from train_data or test_data",
    ):
        open_source(
            "environment_kwargs=domain=retail,workers=1",
            f"test_data=other={repeated_task_file}",
            f"tau2_home={tau2_home}",
        )


def test_null_columns_of_a_table_are_not_arguments():
    table = {
        "extra_info": {
            "task_id": None,
            "actions": [{"name": "cancel_order", "kwargs": {"order": ORDER, "items": None}}, None],
        }
    }
    assert without_nulls(table) == {"extra_info": {"actions": [CANCEL, None]}}


@pytest.mark.seed_behaviour(20)
def test_a_parquet_table_has_the_same_rows(tmp_path: Path):
    exchange = {
        "name": "exchange",
        "kwargs": {"order": ORDER, "items": [{"id": "1"}, {"id": "2", "color": "red"}]},
    }
    rows = [
        row("retail", "8", instruction="You want it.", actions=[CANCEL, exchange], outputs=["12"]),
        row("retail", "9"),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == read_rows(write_json_lines(tmp_path / "rows.jsonl", *rows))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"domain": "retail"}], "rows.jsonl:1: the row has no extra_info"),
        (
            [{"extra_info": {"task_id": 1}}],
            "rows.jsonl:1: the row names no domain; give extra_info.domain or data_source",
        ),
        ([row("retail", "1"), row("retail")], "rows.jsonl:2: the row names no task"),
        (
            [row("retail", "1", instruction="x", actions=[1])],
            "rows.jsonl:1: the actions are not a list of objects",
        ),
        (
            [row("retail", "1", instruction="x", actions='[{"name": "fl')],
            "rows.jsonl:1: the actions are not a list of objects",
        ),
        (
            [row("retail", "1", instruction="x", actions={"name": "fly"})],
            "rows.jsonl:1: the actions are not a list of objects",
        ),
        (
            [row("retail", "1", instruction="x", actions=[], outputs="327")],
            "rows.jsonl:1: outputs is not a list; correct it",
        ),
        (
            [row("healthcare", "1")],
            "train_data or test_data: domain=healthcare is not one of toy_retail, retail",
        ),
        ([row("toy_retail", "nowhere")], "toy_retail has no task nowhere"),
        (
            [row("toy_retail", "a", instruction="x", actions=[{"name": "fly"}])],
            "toy_retail: a: a gold action fails",
        ),
        ([row("toy_retail", "cancel-train-1")] * 2, "two tasks have the id cancel-train-1"),
    ],
)
def test_invalid_rows_are_rejected_with_one_line(tmp_path: Path, rows: list[dict[str, object]], message: str):
    with pytest.raises(ConfigError, match=message):
        open_source(f"train_data={write_json_lines(tmp_path / 'rows.jsonl', *rows)}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train_data=rows.csv"], "rows.csv is neither a .jsonl nor a .parquet file"),
        (["train_data=nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory"),
        (["test_data=toy_retail:dev"], "toy_retail has no split dev; its splits are train and test"),
        (
            ["env=harbor", "tasks_dir=.", "train_data=a.jsonl", "enable_summarize=false"],
            "train_data is not for env=harbor; use tasks_dir",
        ),
        (["domain_mixture=retail=0"], "domain_mixture retail needs a number above 0, not '0'"),
        (
            ["domain_mixture=retail=1", "task_sampling=thompson"],
            "domain_mixture chooses the tasks of each batch; remove task_sampling=thompson",
        ),
    ],
)
@pytest.mark.seed_behaviour(15)
def test_unsupported_options_are_rejected(options: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        open_source(*options)


def make_tasks(**num_tasks: int) -> list[Task]:
    return [
        Task(id=f"{domain}/{number}", path=ROOT, domain=domain)
        for domain, count in num_tasks.items()
        for number in range(count)
    ]


@pytest.mark.seed_behaviour(19)
def test_a_mixture_gives_each_domain_its_share_of_every_batch():
    pool = make_tasks(airline=4, retail=16)
    settings = ScheduleOptions(
        batch_size=4, n_epochs=4, max_steps=None, seed=0, domain_mixture=["airline=1", "retail=1"]
    )
    plan = schedule(pool, settings)
    assert len(plan) == 20 and [batch.epoch for batch in plan[::5]] == [0, 1, 2, 3]
    assert all(Counter(task.domain for task in batch.tasks) == {"airline": 2, "retail": 2} for batch in plan)
    assert all(len({task.id for task in batch.tasks}) == 4 for batch in plan)
    counts = Counter(task.id for batch in plan for task in batch.tasks)
    assert {counts[task.id] for task in pool if task.domain == "airline"} == {10}
    assert {counts[task.id] for task in pool if task.domain == "retail"} == {2, 3}
    assert schedule(pool[::-1], settings) == plan  # a resumed run has the same batches
    airline_ids = [task.id for batch in plan for task in batch.tasks if task.domain == "airline"]
    assert len({tuple(airline_ids[start : start + 4]) for start in range(0, 40, 4)}) > 5, (
        "each round has a different order"
    )
    assert schedule(pool, chz.replace(settings, seed=1)) != plan
    assert schedule(pool, chz.replace(settings, max_steps=3)) == plan[:3]
    assert schedule(pool, chz.replace(settings, batch_size=8))  # every batch has all airline tasks


def test_fractional_shares_are_exact_over_the_run():
    settings = ScheduleOptions(
        batch_size=3, n_epochs=10, max_steps=None, seed=0, domain_mixture=["airline=1", "retail=3"]
    )
    plan = schedule(make_tasks(airline=4, retail=8), settings)
    assert Counter(task.domain for batch in plan for task in batch.tasks) == {"airline": 30, "retail": 90}


@pytest.mark.parametrize(
    ("num_tasks", "message"),
    [
        (
            {"retail": 4},
            "domain_mixture names the domains airline, retail, but the training tasks have the domains "
            "retail",
        ),
        ({"retail": 4, "airline": 1}, "airline has 1 tasks, fewer than its share of a batch, 2"),
    ],
)
def test_an_impossible_mixture_is_rejected(num_tasks: dict[str, int], message: str):
    settings = ScheduleOptions(
        batch_size=4, n_epochs=1, max_steps=None, seed=0, domain_mixture=["airline=1", "retail=1"]
    )
    with pytest.raises(ConfigError, match=message):
        schedule(make_tasks(**num_tasks), settings)
