"""Tests that docs/seed-behaviours.md and the tests with the marker `seed_behaviour` name each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seed-behaviours.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]
NUM_DOCUMENTS = 5


@cache
def known_tests() -> Mapping[str, set[int]]:
    """Map `file::name` to the rows in the marker. Files of tests/server have the prefix server/."""
    tests: dict[str, set[int]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = f"server/{path.stem}" if path.parent.name == "server" else path.stem
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                tests.setdefault(f"{file}::{node.name}", set()).update(
                    argument.value
                    for mark in node.decorator_list
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.seed_behaviour"
                    for argument in mark.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
                )
    return tests


def named_tests(text: str) -> list[str]:
    """Return the tests that a row names.

    >>> named_tests("`test_a::test_b`, `::test_c`")
    ['test_a::test_b', 'test_a::test_c']
    """
    tests, file = [], ""
    for named, test in re.findall(r"`([\w/]*)::(test_\w+)`", text):
        file = named or file
        tests.append(f"{file}::{test}")
    return tests


def test_rows_are_numbered_once_in_five_tables():
    numbers = [int(row[0]) for row in ROWS]
    assert sorted(numbers) == list(range(1, len(ROWS) + 1)) and len(ROWS) > 150
    assert len(re.findall(r"^## Document 00\d", PAGE, re.MULTILINE)) == NUM_DOCUMENTS
    assert all(len(row) == 7 for row in ROWS)


def test_every_row_has_a_status_and_a_test_or_a_reason():
    for number, _, item, status, where, why, tests in ROWS:
        assert status in ("present", "changed", "refused") and item and where, number
        assert bool(why) == (status != "present"), f"{number}: only a difference has a reason"
        assert named_tests(tests) or status == "refused", f"{number} names no test"


def test_every_module_and_script_of_a_row_exists():
    for number, _, _, _, where, _, _ in ROWS:
        for path in re.findall(r"`([^`]+)`", where):
            assert (ROOT / path).exists(), f"{number}: there is no {path}"


def test_tests_and_rows_name_each_other():
    named = {(test, int(row[0])) for row in ROWS for test in named_tests(row[6])}
    marked = {(test, number) for test, numbers in known_tests().items() for number in numbers}
    assert named - marked == set(), "the page names tests that do not carry the number of the row"
    assert marked - named == set(), "tests carry numbers of rows that do not name them"


def test_tests_of_the_table_of_answers_exist():
    tests = named_tests(PAGE.partition("## Parsing of tool calls")[2])
    assert len(tests) > 8 and set(tests) <= known_tests().keys()
