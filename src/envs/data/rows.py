"""Questions with reference answers, from the rows of .jsonl and .parquet files.

    {"question": "How much is 6 times 7?", "answer": "6 * 7 = 42 #### 42"}                 as in GSM8K
    {"prompt": [{"role": "user", "content": "..."}], "reward_spec": {"ground_truth": "42"}}  as in SkyRL
    {"messages": [{"role": "user", ...}, {"role": "assistant", "content": "42"}]}          as in chat data

If the last of several messages is an assistant message, it is removed from the conversation. It is the
reference answer, unless an answer column contains a reference answer. The agent sees the remaining assistant
messages as the earlier conversation. If several user messages follow the earlier conversation, the agent
receives the first of them at the start, and each further one after its answer to the previous one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.data.records import Record, read_records
from src.policy.chat import Message

QUESTION_COLUMNS = ("messages", "prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "ground_truth", "target", "solution")
NESTED_ANSWERS = ("reward_spec", "reward_model")  # columns of SkyRL and verl; each has a field ground_truth
ID_COLUMNS = ("id", "task_id")
DOMAIN_COLUMNS = ("domain", "data_source")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns that the user selects."""

    question: str | None = None  # None: the first of QUESTION_COLUMNS that the row has
    answer: str | None = None  # None: the first value of ANSWER_COLUMNS and NESTED_ANSWERS that is not null


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row: the messages before the agent's first answer, the user messages that follow its answers, and
    the reference answer."""

    opening: Sequence[Message]
    follow_ups: Sequence[str]
    reference: str | None  # None: the row has no answer
    record: Record
    columns: Columns

    @property
    def text(self) -> str:
        """The text of all messages except system messages. `tasks_of` leaves out a row whose text and
        reference are those of an earlier row."""
        texts = [str(message["content"]) for message in self.opening if message["role"] != "system"]
        return "\n".join([*texts, *self.follow_ups])


def read_questions(path: Path, columns: Columns) -> list[Question]:
    """Read the questions of a file. Raises the errors of `read_records` and `question_of`."""
    return [question_of(record, columns) for record in read_records(path)]


def question_of(record: Record, columns: Columns) -> Question:
    """Return the question of a row. Raises ConfigError with file and line if the row has no valid question or
    lacks a column of `columns`.

    >>> row = Record(values={"question": "6 * 7?", "answer": "42"}, number=1, where="a.jsonl:1")
    >>> question = question_of(row, Columns())
    >>> question.opening, question.reference
    ([{'role': 'user', 'content': '6 * 7?'}], '42')
    """
    present = [name for name in QUESTION_COLUMNS if name in record.values]
    present.sort(key=lambda name: record.values[name] is None)  # a column with a value is preferred
    column = columns.question or next(iter(present), None)
    if column is None or column not in record.values:
        raise _missing(record, column, QUESTION_COLUMNS, option="question")
    messages = _messages(record.values[column], where=f"{record.where}: {column}")
    reference = _reference(record, columns)
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        answer = str(messages.pop()["content"])
        reference = answer if reference is None else reference
    if messages[-1]["role"] != "user":
        raise ConfigError(f"{record.where}: {column} does not end with a user message; correct it")
    last_answer = max(i for i, message in enumerate(messages) if i == 0 or message["role"] == "assistant")
    last_opening = next(i for i in range(last_answer, len(messages)) if messages[i]["role"] == "user")
    follow_ups = messages[last_opening + 1 :]
    if any(message["role"] == "system" for message in follow_ups):
        raise ConfigError(
            f"{record.where}: {column} has a system message between the last user messages; "
            "move it before these or remove it"
        )
    return Question(
        opening=messages[: last_opening + 1],
        follow_ups=[str(message["content"]) for message in follow_ups],
        reference=reference,
        record=record,
        columns=columns,
    )


def tasks_of(questions: Sequence[Question], path: Path, *, name: str = "") -> list[Task]:
    """Return a task for each question. A row with the same `Question.text` and reference answer as an earlier
    row is left out.

    The id of a task is the id in its row, or else the name of the file and the number of the record. `name`
    is the domain in metrics; if it is empty, the domain in the row is used. Raises ConfigError if two tasks
    have the same id.
    """
    tasks: dict[tuple[str, str | None], Task] = {}
    where_of: dict[str, str] = {}  # id of a task -> file and line
    for question in questions:
        values = question.record.values
        row_id = next((values[column] for column in ID_COLUMNS if values.get(column) is not None), None)
        domain = next((values[column] for column in DOMAIN_COLUMNS if values.get(column) is not None), "")
        task = Task(
            id=f"{path.stem}-{question.record.number:05d}" if row_id is None else str(row_id),
            path=path,
            instruction=question.text,
            domain=name or str(domain),
            row={"question": question},
        )
        if (question.text, question.reference) in tasks:
            continue
        if task.id in where_of:
            raise ConfigError(
                f"{question.record.where}: the id {task.id} is also the id of {where_of[task.id]}; change "
                "one of them"
            )
        tasks[question.text, question.reference] = task
        where_of[task.id] = question.record.where
    return list(tasks.values())


def _messages(value: object, *, where: str) -> list[Message]:
    """Parse the messages of a column: a text, a list of messages, or such a list as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError):  # a question that is plain text may also begin with `[{`
            value = json.loads(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    messages: list[Message] = []
    for message in value if isinstance(value, Sequence) else [None]:
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, Mapping) else ("", "")
        )
        if role not in ROLES or not isinstance(content, str):
            raise ConfigError(
                f"{where} is not a text and not a list of messages with role ({', '.join(ROLES)}) and "
                "content; correct it"
            )
        messages.append({"role": role, "content": content})
    if not any(str(message["content"]).strip() for message in messages if message["role"] == "user"):
        raise ConfigError(f"{where} has no user message with a text; correct or remove the row")
    return messages


def _reference(record: Record, columns: Columns) -> str | None:
    values: Mapping[str, Any] = record.values
    if columns.answer is not None and columns.answer not in values:
        raise _missing(record, columns.answer, ANSWER_COLUMNS, option="answer")
    nested = (values[name] for name in NESTED_ANSWERS if isinstance(values.get(name), Mapping))
    candidates = (
        [values[columns.answer]]
        if columns.answer
        else [
            *(values[name] for name in ANSWER_COLUMNS if name in values),
            *(part["ground_truth"] for part in nested if "ground_truth" in part),
        ]
    )
    value = next((candidate for candidate in candidates if candidate is not None), None)
    if value is None:
        return None
    if isinstance(value, (str, Decimal, date)):  # a parquet table can contain decimals and dates
        return str(value)
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ConfigError(
            f"{record.where}: the answer cannot be read ({error}); give a text or a number"
        ) from error


def _missing(
    record: Record, column: str | None, default_columns: Sequence[str], *, option: str
) -> ConfigError:
    columns = ", ".join(record.values) or "none"
    if column is not None:
        return ConfigError(
            f"{record.where}: there is no column {column}; the row has {columns}; correct "
            f"environment_kwargs={option}={column}"
        )
    return ConfigError(
        f"{record.where}: there is none of the columns {', '.join(default_columns)}; the row has "
        f"{columns}; name one with environment_kwargs={option}=COLUMN"
    )


def require_reference(question: Question) -> str:
    """Return the reference answer. Raises ConfigError if the row has none."""
    if question.reference is None:
        record, selected = question.record, question.columns.answer
        names = ANSWER_COLUMNS if selected is None else (selected,)
        null_column = next((column for column in names if column in record.values), None)
        if null_column is not None:
            raise ConfigError(f"{record.where}: {null_column} is null; give the reference answer")
        raise _missing(record, None, ANSWER_COLUMNS, option="answer")
    return question.reference
