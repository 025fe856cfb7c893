"""Apply the patches of docs/how-to/add-a-loss.md to a copy of the server and run the tests of the losses
there."""

import json
import math
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from skyrl_tx_server.training.losses import LossInputs, LossTerms
from tests.server.test_how_to_server import apply, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-a-loss.md").read_text()
USE_NEW_LOSS = """
import json
import numpy as np
from skyrl_tx_server.engine.loss_spec import LossFn
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.http.wire.training_requests import parse_loss_config, parse_loss_fn
from skyrl_tx_server.training.losses import LossInputs, select_loss, token_losses

loss_fn = parse_loss_fn("soft_clip")
selection = select_loss(loss_fn, parse_loss_config(loss_fn, {"sharpness": 2.0}))
ones = np.ones(2, np.float32)
inputs = LossInputs(weights=ones, sampler_logprobs=-2 * ones, advantages=3 * ones, counts=ones)
print(token_losses(selection, -ones, inputs).tolist())
try:
    parse_loss_config(loss_fn, {"sharpness": 101.0})
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the server and its tests with the patches applied."""
    copy = tmp_path_factory.mktemp("patched")
    for name in ("skyrl_tx_server", "tests", "pyproject.toml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    (copy / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "server-contract.md", copy / "docs")
    for patch in patches():
        apply(patch, copy)
    return copy


def patches() -> list[str]:
    return re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_changes_at_most_four_files() -> None:
    assert len({patch.splitlines()[1] for patch in patches()}) <= 4


def test_the_page_lists_every_field_of_loss_terms() -> None:
    names = {field.name for field in fields(LossTerms)} - {"inputs"}
    names |= {f"inputs.{field.name}" for field in fields(LossInputs)}
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert names <= {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_the_patched_server_accepts_and_computes_the_new_loss(patched: Path) -> None:
    losses, message = run(patched, "-c", USE_NEW_LOSS).splitlines()
    gate = 1 / (1 + math.exp(-2 * (math.e - 1)))
    assert json.loads(losses) == pytest.approx([-6 * gate] * 2)
    assert message == "loss_fn_config: sharpness must be a finite number between 0.01 and 100, got 101.0"


def test_the_patched_server_passes_the_tests_of_the_losses(patched: Path) -> None:
    printed = run(patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/server/test_losses.py")
    assert re.search(r"\d+ passed", printed) or "[100%]" in printed
