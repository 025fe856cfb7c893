"""The quick starts of `./run_skyrl_tx.sh`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.quick_starts import ARITHMETIC, QUICKSTART_OPTIONS, QUICKSTARTS
from scripts.quickstart import make_arithmetic
from scripts.run_skyrl_tx import chosen_quick_start
from src.cli.command_line import parse
from src.core.errors import ConfigError


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_every_quick_start_is_a_valid_run(name: str) -> None:
    options = QUICKSTART_OPTIONS | QUICKSTARTS[name].options | {"model_name": "local/m"}
    base = ("backend=skyrl-tx", "skyrl_tx_url=http://localhost:1", "log_path=runs/a")
    parse([*base, *(f"{option}={value}" for option, value in options.items())])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "terminal"),
        ({"env": "tau_bench"}, "tau_bench"),
        ({"quickstart": "tau_bench"}, "tau_bench"),
        ({"quickstart": "arithmetic"}, "arithmetic"),
    ],
)
def test_a_quick_start_has_a_name_or_an_environment(given: dict[str, str], name: str) -> None:
    assert chosen_quick_start(given) is QUICKSTARTS[name]


def test_an_unknown_quick_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quickstart=math is none of terminal, tau_bench, arithmetic$"):
        chosen_quick_start({"quickstart": "math"})


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]


def test_the_committed_problems_are_those_of_the_script(tmp_path: Path) -> None:
    make_arithmetic.main(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (ARITHMETIC / name).read_text()


def test_held_out_stories_do_not_occur_in_training() -> None:
    stories = {
        name: {re.sub(r"\d+|[A-Z]\w+", "", row["question"]) for row in rows(name)}
        for name in ("train", "heldout")
    }
    assert not stories["train"] & stories["heldout"]


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_the_answers_of_the_problems_are_right(name: str) -> None:
    for row in rows(name):
        a, sign, b = row["question"].rpartition("What is ")[2].removesuffix("?").split()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
