"""Tests that docs/skyrl-semantics.md names an existing test for every reference case."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.seed_behaviour(137)
def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "skyrl-semantics.md").read_text()
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", page)
    assert len(named) > 50
    for file, name in named:
        assert re.search(rf"def {name}\(", (Path(__file__).parent / file).read_text()), (
            f"{file} has no {name}"
        )
    cases = [
        *(f"L{i}" for i in range(1, 16)),
        *(f"S{i}" for i in range(1, 9)),
        "G1",
        "G4",
        "G5",
        "R1",
        "X1",
        "X2",
        "RP",
    ]
    rows = " ".join(
        line.split("|")[1] for line in page.splitlines() if line.startswith("| ") and "::" in line
    )
    assert [case for case in cases if not re.search(rf"\b{case}\b", rows)] == []
