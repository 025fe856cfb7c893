"""Runs the quick start of service agents with its own model and server, reduced to one step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = ["cancel-refused-test-1", "price-test-1", "return-test-1"]


def test_the_service_quick_start_takes_a_step(tmp_path: Path) -> None:
    small = [
        "max_steps=1",
        "batch_size=2",
        "group_size=4",
        "eval_group_size=2",
        f"eval_tasks={','.join(HELD_OUT)}",
    ]
    command = [
        sys.executable,
        "-m",
        "scripts.run_skyrl_tx",
        "env=tau_bench",
        f"log_path={tmp_path / 'run'}",
        *small,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "tasks: 40 to train on, 3 held out; 1 steps" in done.stdout
    # Refusing is the correct answer to one of the three tasks.
    assert "points); doing nothing: 33.3%" in done.stdout
    _, step = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert step["trials/graded"] == 8 and step["env/all/tool_calls"] > 0 and step["tokens/trained"] > 0
    # Sampler and trainer have the same weights.
    assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3


def test_a_mistake_stops_in_one_line_before_the_server_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.run_skyrl_tx", f"log_path={tmp_path / 'run'}", "learning_rat=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "run_skyrl_tx: unknown option 'learning_rat'; did you mean learning_rate?\n",
    )
    assert list(tmp_path.iterdir()) == []
