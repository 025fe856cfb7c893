"""Makes datasets/arithmetic: word problems with two or three small numbers, for SmolLM2-135M.

    python -m scripts.quickstart.make_arithmetic [datasets/arithmetic]

A family is a situation and an operation. The families of `heldout.jsonl` have other situations than those of
`train.jsonl`, so the held-out score measures arithmetic and not the memory of a sentence. The files are the
same at every call.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jonas", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "pens", "stones", "cards", "shells", "eggs", "stamps", "keys")
INSTRUCTION = "Write only the number."
TRAIN_PER_FAMILY, HELD_OUT_PER_FAMILY = 24, 8
LOWEST = 2
SEED = 0


@dataclass(frozen=True, slots=True)
class Family:
    """Problems that differ in their names, things and numbers."""

    name: str
    answer: Callable[[int, int, int], int]  # of the numbers a, b and c
    text: str  # with {name}, {other}, {things}, {a}, {b} and {c}
    highest: int = 10  # each number is at least LOWEST


def plus(a: int, b: int, c: int) -> int:
    return a + b


def minus(a: int, b: int, c: int) -> int:
    """The first number is the larger one (`problem`)."""
    return a - b


def times(a: int, b: int, c: int) -> int:
    return a * b


def plus_plus(a: int, b: int, c: int) -> int:
    return a + b + c


TRAIN = (
    Family(
        "basket",
        plus,
        "{name} has {a} {things} in a basket and puts {b} more into it. How many {things} are in the basket?",
    ),
    Family(
        "gift",
        plus,
        "{name} has {a} {things}. {other} gives {name} {b} {things}. How many {things} does {name} have now?",
    ),
    Family(
        "two-boxes",
        plus,
        "One box holds {a} {things} and another box holds {b} {things}. How many {things} are in both boxes?",
    ),
    Family(
        "days",
        plus,
        "{name} collects {a} {things} on Monday and {b} {things} on Tuesday. How many "
        "{things} is that together?",
    ),
    Family(
        "lost",
        minus,
        "{name} has {a} {things} and loses {b} of them. How many {things} are left?",
    ),
    Family(
        "sold",
        minus,
        "A shop has {a} {things}. It sells {b} of them. How many {things} does the shop still have?",
    ),
    Family(
        "older",
        minus,
        "{name} is {a} years old. {other} is {b} years younger. How old is {other}?",
    ),
    Family(
        "bags",
        times,
        "There are {a} bags with {b} {things} each. How many {things} are there?",
        highest=5,
    ),
    Family(
        "rows",
        times,
        "{name} lays {a} rows of {b} {things}. How many {things} is that?",
        highest=5,
    ),
    Family(
        "three-friends",
        plus_plus,
        "Three friends have {a}, {b} and {c} {things}. How many {things} do they have together?",
        highest=6,
    ),
)
HELD_OUT = (
    Family(
        "bus",
        plus,
        "A bus carries {a} people. At the next stop {b} people get on. How many people are on the bus?",
    ),
    Family(
        "garden",
        plus,
        "{name} plants {a} trees in spring and {b} trees in autumn. How many trees does "
        "{name} plant in the year?",
    ),
    Family(
        "eaten",
        minus,
        "There are {a} cakes on a table. {name} eats {b} of them. How many cakes remain?",
    ),
    Family(
        "pages",
        minus,
        "A book has {a} pages. {name} has read {b} pages. How many pages are still to read?",
    ),
    Family(
        "tickets",
        times,
        "{name} buys {a} tickets. Each ticket costs {b} dollars. How many dollars does {name} pay?",
        highest=5,
    ),
    Family(
        "weeks",
        plus_plus,
        "{name} saves {a} dollars in the first week, {b} in the second and {c} in the third. "
        "How many dollars is that in all?",
        highest=6,
    ),
)


def problem(family: Family, rng: random.Random, number: int) -> dict[str, str]:
    """Return one row of a file: its id, the question and the answer."""
    a, b, c = (rng.randint(LOWEST, family.highest) for _ in range(3))
    if family.answer is minus:
        a, b = max(a, b) + 1, min(a, b)
    name, other = rng.sample(NAMES, 2)
    text = family.text.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b, c=c)
    return {
        "id": f"{family.name}-{number:02d}",
        "question": f"{text} {INSTRUCTION}",
        "answer": str(family.answer(a, b, c)),
    }


def problems(families: Sequence[Family], per_family: int, rng: random.Random) -> list[dict[str, str]]:
    """Return `per_family` different problems of each family."""
    rows: dict[str, dict[str, str]] = {}
    for family in families:
        target = len(rows) + per_family
        while len(rows) < target:
            row = problem(family, rng, per_family - target + len(rows) + 1)
            rows.setdefault(row["question"], row)
    return list(rows.values())


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("train", problems(TRAIN, TRAIN_PER_FAMILY, rng)),
        ("heldout", problems(HELD_OUT, HELD_OUT_PER_FAMILY, rng)),
    ):
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "datasets/arithmetic"))
