"""Tests that a run that is killed at any point and resumed equals the uninterrupted run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.killable import MODES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.seed_behaviour(23)
def test_sigkill_at_random_points_changes_nothing(tmp_path, mode):
    command = [sys.executable, "-m", "tests.fakes.killable", str(tmp_path), "8", "7", mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 runs ended as" in done.stdout


def test_sigkill_changes_nothing_with_thompson_sampling(tmp_path):
    # With a low rate, the rewards of some groups differ in every step.
    options = ("task_sampling=thompson", "exploration_floor=0.5", "dynamic_sampling=filter")
    options += ("learning_rate=0.1",)
    command = [sys.executable, "-m", "tests.fakes.killable", str(tmp_path), "2", "3", "synchronous", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs ended as the uninterrupted run" in done.stdout
