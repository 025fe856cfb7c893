"""docs/seed-behaviours.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "seed-behaviours.md").read_text()


def test_every_test_that_the_page_names_is_there():
    sources = {path.stem: path.read_text() for path in HERE.rglob("test_*.py")}
    known = set(sources) | {name for text in sources.values() for name in re.findall(r"def (test_\w+)", text)}
    named = set(re.findall(r"\btest_\w+", PAGE))
    assert named and named <= known, sorted(named - known)


def test_no_behaviour_has_two_rows():
    numbers = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert len(numbers) == len(set(numbers)) and all(1 <= int(number) <= 98 for number in numbers)
