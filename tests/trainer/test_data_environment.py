"""Tests env=data: questions from files, the reward functions, and errors with file and line."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from src.cli.command_line import parse, parse_as
from src.config import run_name
from src.core.errors import ConfigError
from src.core.trajectory import StopReason, Trajectory, TrialFailure, ZeroReason
from src.envs.base import TaskSource
from src.envs.data import rewards
from src.envs.data.records import Record, read_records
from src.envs.data.rewards import FunctionReward, last_number, marked, open_reward
from src.envs.data.rows import Columns, question_of
from src.envs.registry import check_environment, open_task_source
from src.envs.service import subprocess_pool
from src.evaluate.config import EvaluateConfig
from src.evaluate.contamination import task_hashes
from tests.fakes.policy import FakePolicy
from tests.fakes.run import OWN_SERVER
from tests.fakes.tokenizer import byte_chat

GSM8K = [
    {"question": f"How much is {n} times 7?", "answer": f"{n} * 7 = {7 * n}\n#### {7 * n}"} for n in range(10)
]


def written(path: Path, *rows: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(*options: str) -> TaskSource:
    config = parse([*OWN_SERVER, "context_limit=8000", *options])
    check_environment(config)
    return open_task_source(config, byte_chat())


async def run_trial(source: TaskSource, *answers: str) -> Trajectory:
    trial = source.trial(source.train[0], directory=Path("unused"), seed=1, temperature=1.0)
    result = await trial.run(FakePolicy(byte_chat(), answers))
    assert isinstance(result, Trajectory), result
    return result


def question(**values: object):
    return question_of(Record(values=values, number=1, where="a.jsonl:1"), Columns())


async def test_a_file_like_gsm8k_needs_only_data_and_reward(tmp_path: Path):
    source = opened(f"data={written(tmp_path / 'sums.jsonl', *GSM8K)}", "reward=number", "eval_split=0.3")
    assert (len(source.train), len(source.eval)) == (7, 3)
    task = source.train[0]
    number = int(re.findall(r"\d+", task.instruction)[0])
    assert task.id == f"sums-{number + 1:05d}"
    right = await run_trial(source, f"<think>7 and 8</think>It is ${7 * number}.00")
    wrong = await run_trial(source, f"{7 * number}, no: 3")
    assert (right.reward, wrong.reward, right.stop_reason) == (1.0, 0.0, StopReason.STOP)
    assert right.conversation[0] == {"role": "user", "content": task.instruction}


def test_data_selects_its_environment_and_names_the_run(tmp_path: Path):
    config = parse([*OWN_SERVER, f"data={tmp_path / 'sums.jsonl'}", "reward=exact"])
    assert config.env == "data" and run_name(config, date="today").startswith("sums-m-")
    evaluation = parse_as(
        EvaluateConfig, ["model_name=m", "base_url=http://h:1/v1", "data=a.jsonl", "reward=exact"]
    )
    assert evaluation.env == "data" and evaluation.environment.data == ["a.jsonl"]


def test_parquet_rows_are_read_like_json_lines(tmp_path: Path):
    rows = [
        {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_model": {"ground_truth": "4", "style": None},
        },
        {
            "prompt": [{"role": "user", "content": "3+3?"}],
            "reward_model": {"ground_truth": "6", "style": "rule"},
        },
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [record.where for record in read_records(path)] == [f"{path}, row 1", f"{path}, row 2"]
    tasks = opened(f"data={path}", "reward=number", "eval_split=0").train
    assert [task.instruction for task in tasks] == ["2+2?", "3+3?"]
    assert tasks[0].row["question"].reference == "4"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("row", "opening", "follow_ups", "reference"),
    [
        ({"prompt": "a?", "answer": 3}, ["a?"], [], "3"),
        ({"problem": "a?", "solution": "b"}, ["a?"], [], "b"),
        ({"messages": '[{"role": "user", "content": "a?"}]', "target": "b"}, ["a?"], [], "b"),
        ({"messages": "sua", "answer": None}, ["s", "u"], [], "a"),
        ({"messages": "sua", "ground_truth": "g"}, ["s", "u"], [], "g"),
        ({"messages": "uauu", "answer": "g"}, ["u", "a", "u"], ["u"], "g"),
        ({"messages": "suuu"}, ["s", "u"], ["u", "u"], None),
    ],
)
def test_the_usual_columns_are_read(row, opening, follow_ups, reference):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    if row.get("messages", "[")[0] != "[":
        row = row | {"messages": [{"role": roles[letter], "content": letter} for letter in row["messages"]]}
    parsed = question(**{name: value for name, value in row.items() if value is not None})
    assert [message["content"] for message in parsed.opening] == opening
    assert (list(parsed.follow_ups), parsed.reference) == (follow_ups, reference)


def test_a_null_question_column_is_skipped():
    parsed = question(messages=None, question="1+1?", answer="2")
    assert [message["content"] for message in parsed.opening] == ["1+1?"]


async def test_later_user_messages_are_sent_one_by_one(tmp_path: Path):
    turns = [{"role": "user", "content": text} for text in ("Say 1.", "Now 2.", "Now 3.")]
    path = written(tmp_path / "turns.jsonl", {"messages": turns, "answer": "3"})
    source = opened(f"data={path}", "reward=exact", "eval_split=0")
    result = await run_trial(source, "1", "2", "3")
    contents = [message["content"] for message in result.conversation]
    assert contents == ["Say 1.", "1", "Now 2.", "2", "Now 3.", "3"] and result.reward == 1.0
    assert (await run_trial(source, "3", "3", "2")).reward == 0.0  # the last answer is graded


@pytest.mark.parametrize("option", ["max_answers", "attempts"])  # the second is the former name
async def test_max_answers_lets_the_agent_try_again(tmp_path: Path, option: str):
    path = written(tmp_path / "a.jsonl", GSM8K[1])
    source = opened(f"data={path}", "reward=number", f"environment_kwargs={option}=2", "eval_split=0")
    results = [await run_trial(source, *answers) for answers in (["7"], ["6", "7"], ["6", "5"])]
    assert [(len(result.turns), result.reward) for result in results] == [(1, 1.0), (2, 1.0), (2, 0.0)]


async def test_a_system_message_comes_from_a_file(tmp_path: Path):
    (tmp_path / "system.txt").write_text("Answer with a number, nothing else.\n")
    path = written(tmp_path / "a.jsonl", {"q": "1+1?", "a": "2"})
    options = f"environment_kwargs=system={tmp_path / 'system.txt'},question=q,answer=a"
    result = await run_trial(opened(f"data={path}", "reward=exact", options, "eval_split=0"), "2")
    assert result.conversation[0] == {"role": "system", "content": "Answer with a number, nothing else."}
    assert result.reward == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", "1234"),
        ("3-5", "5"),
        ("is −2.50.", "-2.50"),
        (".5", ".5"),
        ("about 1e3", "1e3"),
        ("v2.0", None),
        (r"\boxed{10,\!000}", "10000"),
        ("1{,}234", "1234"),
        (r"-1\,234\,567.5", "-1234567.5"),
        (r"1\,23", "23"),
    ],
)
def test_the_last_number_of_an_answer_is_found(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("reward", "cases"),
    [
        ("exact", [(" Paris\n", "Paris", 1), ("paris", "Paris", 0), (r"So \boxed{x^{2}}.", "x^{2}", 1)]),
        ("number", [("It is 42", "6*7 #### 42.0", 1), ("none", "42", 0)]),
        ("regex", [("In Paris.", r"\b[Pp]aris\b", 1), ("comparison", r"\b[Pp]aris\b", 0)]),
        ("math", [(r"$\boxed{0.5}$", r"\frac{1}{2}", 1), ("$1+x^2$", "x^2+1", 1), ("I think 6", "5", 0)]),
    ],
)
async def test_rewards_compare_answers_with_references(reward, cases):
    function = open_reward(reward)
    for answer, reference, expected in cases:
        graded = await function.grade(answer, question(question="?", answer=reference))
        assert graded.reward == expected, (answer, reference)
    await function.close()


@pytest.mark.parametrize(
    ("reward", "answer", "reference"), [("math", "$9^{9^{9^9}}$", "3"), ("regex", "a" * 40, "(a+)+b")]
)
async def test_an_endless_comparison_gives_reward_0(tmp_path, monkeypatch, reward, answer, reference):
    monkeypatch.setattr(rewards, "GRADING_TIMEOUT_S", 1.5)
    source = opened(
        f"data={written(tmp_path / 'a.jsonl', {'question': '?', 'answer': reference})}",
        f"reward={reward}",
        "eval_split=0",
    )
    result = await run_trial(source, answer)
    assert (result.reward, result.zero_reason) == (0.0, ZeroReason.VERIFIER_TIMEOUT)
    await source.close()


async def test_a_grading_worker_that_does_not_start_gives_no_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess_pool, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(subprocess_pool, "GRACE_S", 0.01)
    questions = written(tmp_path / "a.jsonl", {"question": "?", "answer": "3"})
    source = opened(f"data={questions}", "reward=math", "eval_split=0")
    trial = source.trial(source.train[0], directory=Path("unused"), seed=1, temperature=1.0)
    result = await trial.run(FakePolicy(byte_chat(), ("3",)))
    assert isinstance(result, TrialFailure) and "a worker did not start" in str(result)
    await source.close()


def test_a_changed_reference_answer_changes_the_content_of_its_task(tmp_path: Path):
    def contents(*rows: Mapping[str, object]) -> dict[str, str]:
        source = opened(f"data={written(tmp_path / 'a.jsonl', *rows)}", "reward=exact", "eval_split=0")
        return {task.task_id: task.trial_content for task in task_hashes(source.train)}

    rows = [{"id": name, "question": f"{name}?", "answer": "4"} for name in "ab"]
    before, after = contents(*rows), contents(rows[0], rows[1] | {"answer": "5"})
    assert before["a"] == after["a"] and before["b"] != after["b"]
    assert contents(rows[1]) == {"b": before["b"]}  # the line of a row is not content


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def length(answer, row):\n    return len(answer) / row['longest']\n"
        "async def hint(answer, row):\n"
        "    if answer == row['answer']:\n        return {'reward': 1, 'hints': 0}\n"
        "    return {'reward': 0.25, 'message': 'Think of ' + row['hint']}\n"
        "def broken(answer, row):\n    return 1 / 0\n"
        "def nothing(answer, row):\n    pass\n"
        "def no_reward(answer, row):\n    return {'score': 1}\n"
        "def text(answer, row):\n    return {'reward': 1, 'info': 'x'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("my_rewards")
async def test_a_function_of_the_user_grades_and_replies(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", {"question": "?", "answer": "b", "longest": 8, "hint": "letters"})
    assert (
        await run_trial(opened(f"data={path}", "reward=my_rewards:length", "eval_split=0"), "four")
    ).reward == 0.5
    result = await run_trial(opened(f"data={path}", "reward=my_rewards:hint", "eval_split=0"), "a", "b")
    assert result.turn_rewards == [0.25, 1.0] and result.metrics["hints"] == 0
    assert result.conversation[2] == {"role": "user", "content": "Think of letters"}
    broken = await run_trial(opened(f"data={path}", "reward=my_rewards:broken", "eval_split=0"), "a")
    assert (broken.reward, broken.zero_reason) == (0.0, ZeroReason.ENV_ERROR)
    for name, returned in (
        ("nothing", "None"),
        ("no_reward", "{'score': 1}"),
        ("text", "{'reward': 1, 'info': 'x'}"),
    ):
        result = await run_trial(opened(f"data={path}", f"reward=my_rewards:{name}", "eval_split=0"), "a")
        expected = f"TypeError: the function of reward= returned {returned}; return a number, or a mapping"
        assert result.zero_detail.startswith(expected)


async def test_a_function_that_raises_stop_iteration_has_an_error():
    def grade(answer: str, row: Mapping[str, object]) -> float:
        return next(iter(()))

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await FunctionReward(grade).grade("", question(question="q"))


async def test_functions_that_do_not_return_block_no_other_thread():
    release = threading.Event()

    def grade(answer: str, row: Mapping[str, object]) -> float:
        release.wait()
        return 1.0

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    grading = [
        asyncio.ensure_future(FunctionReward(grade).grade("", question(question="q"))) for _ in range(3)
    ]
    try:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
            await asyncio.to_thread(int)
    finally:
        release.set()
    assert [graded.reward for graded in await asyncio.gather(*grading)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (r"\boxed{1}, no, \boxed{\frac{\sqrt{x^{2}}}{2}}}", r"\frac{\sqrt{x^{2}}}{2}"),
        (r"\boxed{\text{a \boxed{1}}} \boxed {2", r"\text{a \boxed{1}}"),
        (r"\boxed{{1} and \boxed{2}", "2"),
        ("\\boxed{" * 200_000 + "}" * 200_000, "\\boxed{" * 199_999 + "}" * 199_999),
    ],
    ids=["deeper", "nested", "open", "huge"],
)
def test_the_last_box_with_balanced_braces_is_the_result(text: str, result: str):
    assert marked(text) == result


def test_a_number_with_a_huge_exponent_is_no_number():
    assert last_number("1e9999999999999999999") is None


def test_test_data_is_held_out_under_its_name(tmp_path: Path):
    train = written(tmp_path / "train.jsonl", *GSM8K[:4], GSM8K[0])
    test = written(tmp_path / "test.jsonl", *GSM8K[4:6])
    source = opened(f"data={train}", f"test_data=hard={test}", "reward=number")
    assert len(source.train) == 4  # the repeated row is used once
    assert [(task.id, task.domain) for task in source.eval] == [
        ("test-00001", "hard"),
        ("test-00002", "hard"),
    ]


NO_QUESTION = (
    "there is none of the columns messages, prompt, question, problem; the row has q, a; name one with"
)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            '{"question": "a", "answer": "1"}\n{"question": \n',
            [],
            "FILE:2: the line is not JSON (Expecting value",
        ),
        (
            '{"question": "\udce9", "answer": "1"}',
            [],
            "FILE:1: the line is not UTF-8 text; save the file as UTF-8",
        ),
        ('\n["a"]\n', [], "FILE:2: the line is a JSON list, not an object; correct it"),
        ('{"q": "a", "a": "1"}', [], f"FILE:1: {NO_QUESTION} environment_kwargs=question=COLUMN"),
        ('{"question": "a"}', [], "FILE:1: there is none of the columns answer, ground_truth"),
        ('{"question": "a", "answer": null}', [], "FILE:1: answer is null; give the reference answer"),
        (
            '{"question": "a", "answer": "1", "b": null}',
            ["environment_kwargs=answer=b"],
            "FILE:1: b is null; give the reference answer",
        ),
        (
            '{"question": "a", "answer": "1"}',
            ["environment_kwargs=answer=b"],
            "FILE:1: there is no column b; the row has question, answer; correct",
        ),
        ('{"question": "", "answer": "1"}', [], "FILE:1: question has no user message with a text"),
        (
            '{"messages": [{"role": "me", "content": "a"}]}',
            [],
            "FILE:1: messages is not a text and not a list",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}',
            [],
            "FILE:1: mess",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, '
            '{"role": "user", "content": "c"}], "answer": "1"}',
            [],
            "FILE:1: messages has a system message between the last user messages; move it before",
        ),
        (
            '{"question": "a", "answer": "one"}',
            [],
            "FILE:1: the answer 'one' has no number; correct it, or use",
        ),
        (
            '{"question": "a", "answer": "("}',
            ["reward=regex"],
            "FILE:1: the answer '(' is not a regular expression",
        ),
        (
            '{"question": "a", "answer": "42|"}',
            ["reward=regex"],
            "FILE:1: the regular expression '42|' matches every answer; correct it",
        ),
        (
            '{"question": "a", "answer": "1", "id": "x"}\n{"question": "b", "answer": "1", "id": "x"}',
            [],
            "FILE:2: the id x is also the id of FILE:1; change one of them",
        ),
        ("\n", [], "FILE has no rows; give a file with at least one row"),
        (
            "",
            ["environment_kwargs=max_answers=0"],
            "environment_kwargs max_answers=0 is not a positive number",
        ),
        (
            "",
            ["environment_kwargs=tries=2"],
            "environment_kwargs: env=data has no option tries; its options are",
        ),
        ("", ["environment_kwargs=system=no.txt"], "environment_kwargs system=no.txt cannot be read"),
        (
            "",
            ["reward=maths"],
            "reward=maths is none of exact, number, regex, math; choose one, or give your own",
        ),
        ("", ["reward=json:no"], "reward=json:no: json has no function no"),
        ('{"question": "1?", "answer": "1"}', ["eval_tasks=absent"], "eval_tasks: 'absent' matches no task"),
    ],
)
def test_a_mistake_in_the_data_gives_a_one_line_error(tmp_path: Path, text, options, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text, errors="surrogateescape")
    config = parse([*OWN_SERVER, f"data={path}", "reward=number", *options])
    with pytest.raises(ConfigError) as refused:
        check_environment(config)
    assert str(refused.value).startswith(message.replace("FILE", str(path))) and "\n" not in str(
        refused.value
    )


def test_answers_of_a_parquet_table_can_be_decimals_and_dates(tmp_path: Path):
    values = {"n": [Decimal("1.50")], "day": [date(2026, 1, 2)], "raw": [b"1"], "question": ["?"]}
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    (record,) = read_records(path)
    references = [question_of(record, Columns(answer=name)).reference for name in ("n", "day")]
    assert references == ["1.50", "2026-01-02"]
    with pytest.raises(
        ConfigError, match=r"rows.parquet, row 1: the answer cannot be read \(Object of type bytes"
    ):
        question_of(record, Columns(answer="raw"))


def test_a_question_in_both_files_is_refused(tmp_path: Path):
    train, test = (
        written(tmp_path / "a.jsonl", *GSM8K),
        written(tmp_path / "b.jsonl", {"question": "?", "answer": 1}, GSM8K[3]),
    )
    with pytest.raises(
        ConfigError, match=re.escape(f"{test}:2: the question is also in {train}:4; remove it")
    ):
        opened(f"data={train}", f"test_data={test}", "reward=number")


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet"])
def test_a_missing_file_gives_a_one_line_error(tmp_path: Path, name):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / name} cannot be read")):
        read_records(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data=a.jsonl"], "missing: reward; write reward=exact, number, regex, math or module:function"),
        (["env=data", "reward=exact"], "env=data needs data=FILE.jsonl or data=FILE.parquet"),
        (
            ["data=a.jsonl", "reward=exact", "tasks_dir=."],
            "tasks_dir is not for env=data; use data",
        ),
        (
            ["env=openenv", "tasks_dir=."],
            "tasks_dir is not for env=openenv; use environment_kwargs=tasks=NUMBER",
        ),
        (
            ["env=openenv", "proactive_summarization_threshold=9"],
            "proactive_summarization_threshold is for env=harbor, not env=openenv; "
            "remove proactive_summarization_threshold",
        ),
        (["tasks_dir=.", "reward=exact"], "reward is for env=data, not env=harbor; remove reward"),
        (["env=tau_bench", "data=a.jsonl"], "data is for env=data, not env=tau_bench; remove data"),
        (["data=a.jsonl", "reward=exact", "train_data=b.jsonl"], "train_data is not for env=data; use data"),
        *(
            (["tau2_home=tau2", *others], f"tau2_home is for env=tau_bench, not env={env}; remove tau2_home")
            for env, others in (
                ("data", ["data=a.jsonl", "reward=exact"]),
                ("harbor", ["tasks_dir=."]),
                ("fleet", ["env=fleet", "train_data=a.jsonl"]),
                ("openenv", ["env=openenv"]),
            )
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse([*OWN_SERVER, *options])
