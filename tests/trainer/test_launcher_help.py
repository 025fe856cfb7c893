"""Tests the help of `./run_skyrl_tx.sh`."""

from __future__ import annotations

import pytest

from scripts.launcher_help import LAUNCHER_OPTIONS
from scripts.recipe_options import RECIPE_OPTIONS
from scripts.run_skyrl_tx import main


def test_the_help_has_own_options_and_changed_defaults(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("Trains with the server of this repository")
    assert any(line.startswith("  ./run_skyrl_tx.sh env=tau_bench ") for line in lines)
    for name in LAUNCHER_OPTIONS:
        assert any(line.startswith(f"  {name} ") and f"{name}=" in line for line in lines)
    assert f"  batch_size = {RECIPE_OPTIONS['batch_size']}, not 1" in lines
    assert "  backend = skyrl-tx, not tinker" in lines
    assert "  logs_dir = ./runs, not /tmp/terminus2-training" in lines
    assert "--help WORD" in lines[-1] and "docs/options.md" in lines[-1]


def test_the_help_of_a_word_lists_options_of_the_trainer(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "summarization"]) == 0
    assert "  proactive_summarization_threshold = " in capfd.readouterr().out
