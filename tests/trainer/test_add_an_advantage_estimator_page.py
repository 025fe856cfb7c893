"""Apply the patches of docs/how-to/add-an-advantage-estimator.md to a copy of the trainer and use the new
estimator there."""

import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from src.learning.advantages import AdvantageEstimator
from tests.server.test_how_to_server import apply, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-an-advantage-estimator.md").read_text()
USE_NEW_ESTIMATOR = """
from src.cli.command_line import parse
options = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1", "tasks_dir=t"]
print(parse([*options, "advantage_estimator=range"]).estimator)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the trainer and its tests with the patches applied and the pages generated."""
    copy = tmp_path_factory.mktemp("patched")
    for name in ("src", "scripts", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for patch in re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        apply(patch, copy)
    run(copy, "-m", "scripts.docs", "advantages")
    return copy


def test_the_page_describes_every_field():
    assert [field.name for field in fields(AdvantageEstimator) if f"| `{field.name}` |" not in PAGE] == []


def test_the_new_estimator_is_selected_and_listed(patched: Path):
    assert run(patched, "-c", USE_NEW_ESTIMATOR) == "range\n"
    row = "| `range` | (r - mean) / (max - min) of the group |  | an example |"
    assert row in (patched / "docs" / "advantages.md").read_text()


def test_the_tests_of_the_estimators_pass_with_the_new_one(patched: Path):
    tests = "tests/trainer/test_advantages.py"
    assert "[100%]" in run(patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
