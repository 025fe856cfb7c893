"""Runs the worked example of docs/how-to/add-a-metric.md."""

import re
from pathlib import Path

import pytest

from src.learning import metrics
from tests.trainer.test_metrics_table import SmallRun

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-metric.md"


@pytest.fixture
def example() -> dict:
    """Run the code of the page, with its assertions. Returns the variables that it defines."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    return names


def test_the_page_has_an_example(example):
    assert example["longest_trial"].name == "env/all/turns_max"


async def test_an_added_entry_is_logged_by_training_and_evaluation(example, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "LENGTH_METRICS", (*metrics.LENGTH_METRICS, example["longest_trial"]))
    run = SmallRun(tmp_path)
    await run.go("max_steps=1")
    line = run.lines("metrics.jsonl")[-1]
    assert line["env/all/turns_max"] >= 1 and line["test/env/all/turns_max"] >= 1
