"""Write the problems of `quickstart=arithmetic` to datasets/arithmetic.

    python -m scripts.quickstart.make_arithmetic [DIRECTORY]

A problem is a short story with two numbers, followed by the sum or the difference to compute. The problems
are so easy that even a model with 135 million parameters solves some of them. The stories of `heldout.jsonl`
do not occur in `train.jsonl`. Every run of this script writes the same files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.quickstart.arguments import directory_and_options

ROOT = Path(__file__).resolve().parents[2] / "datasets" / "arithmetic"
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jonas", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "pens", "stones", "cards", "shells", "eggs", "stamps", "keys")
TRAIN_PER_TYPE, HELD_OUT_PER_TYPE = 16, 8
MAX_OPERAND = 9
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskType:
    """Problems with one story. They differ in their names, things and numbers."""

    name: str
    sign: str  # + or -
    story: str  # has the placeholders {a} and {b}, and possibly {name}, {other} and {things}


TRAIN = (
    TaskType(name="basket", sign="+", story="{name} has {a} {things} in a basket and puts {b} more into it."),
    TaskType(name="gift", sign="+", story="{name} has {a} {things}. {other} gives {name} {b} {things}."),
    TaskType(name="boxes", sign="+", story="One box holds {a} {things} and another box holds {b}."),
    TaskType(name="days", sign="+", story="{name} finds {a} {things} on Monday and {b} on Tuesday."),
    TaskType(name="friends", sign="+", story="{name} has {a} {things} and {other} has {b}."),
    TaskType(name="lost", sign="-", story="{name} has {a} {things} and loses {b} of them."),
    TaskType(name="sold", sign="-", story="A shop has {a} {things} and sells {b} of them."),
    TaskType(name="younger", sign="-", story="{name} is {a} years old and {other} is {b} years younger."),
    TaskType(name="given", sign="-", story="{name} has {a} {things} and gives {b} of them to {other}."),
    TaskType(name="broken", sign="-", story="There are {a} {things} in a bag, and {b} of them break."),
)
HELD_OUT = (
    TaskType(name="bus", sign="+", story="A bus carries {a} people, and {b} people get on."),
    TaskType(name="trees", sign="+", story="{name} plants {a} trees in spring and {b} in autumn."),
    TaskType(name="savings", sign="+", story="{name} saves {a} dollars this week and {b} the week before."),
    TaskType(name="eaten", sign="-", story="There are {a} cakes on a table, and {name} eats {b} of them."),
    TaskType(name="pages", sign="-", story="A book has {a} pages, and {name} has read {b} of them."),
    TaskType(name="birds", sign="-", story="There are {a} birds on a roof, and {b} fly away."),
)


def problem(task_type: TaskType, rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer. The answer is at least 1."""
    a, b = rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)
    if task_type.sign == "-":
        a += b
    name, other = rng.sample(NAMES, 2)
    story = task_type.story.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
    return f"{story} What is {a} {task_type.sign} {b}?", str(a + b if task_type.sign == "+" else a - b)


def problems(task_types: Sequence[TaskType], per_type: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `per_type` different problems of each task type."""
    rows = []
    for task_type in task_types:
        answers: dict[str, str] = {}
        while len(answers) < per_type:
            question, answer = problem(task_type, rng)
            answers[question] = answer
        rows += [
            {"id": f"{task_type.name}-{number:02d}", "question": question, "answer": answer}
            for number, (question, answer) in enumerate(answers.items(), 1)
        ]
    return rows


def main(directory: Path) -> None:
    rng = random.Random(SEED)
    directory.mkdir(parents=True, exist_ok=True)
    for name, task_types, per_type in (
        ("train", TRAIN, TRAIN_PER_TYPE),
        ("heldout", HELD_OUT, HELD_OUT_PER_TYPE),
    ):
        lines = [json.dumps(row) + "\n" for row in problems(task_types, per_type, rng)]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(directory_and_options(__doc__, ROOT)[0])
