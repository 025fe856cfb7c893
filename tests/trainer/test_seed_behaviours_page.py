"""docs/seed-behaviours.md lists all 98 behaviours, each with existing tests or a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seed-behaviours.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]


def known_tests() -> Mapping[str, set[str]]:
    """Return the names of tests by the name of the file, with server/ before those of the server."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = f"server/{path.stem}" if path.parent.name == "server" else path.stem
        found.setdefault(name, set()).update(
            re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        )
    return found


def test_every_behaviour_has_one_row():
    assert [int(row[0]) for row in ROWS] == list(range(1, 99))


def test_every_row_names_a_test_or_says_why_there_is_none():
    for number, status, what, named in ROWS:
        assert status in ("K", "A", "N") and len(what) > 3, number
        assert "::test_" in named or status == "N", f"{number} names no test"


def test_every_test_that_the_page_names_is_in_the_file_it_names():
    known, file = known_tests(), ""
    references = re.findall(r"`([\w/]*)::(test_\w+)`", PAGE)
    assert len(references) > 98
    for named, test in references:
        file = named or file  # `::test_b` belongs to the file that was named before
        assert test in known.get(file, set()), f"{file} has no {test}"
