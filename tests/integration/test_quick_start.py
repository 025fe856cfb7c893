"""Runs two quick starts of `scripts.run_skyrl_tx`, each with its own server and one training step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = ["cancel-refused-test-1", "price-test-1", "return-test-1"]


def test_the_service_quick_start_takes_a_step(tmp_path: Path) -> None:
    size_options = [
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
        *size_options,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "tasks: 40 to train on, 3 held out; 1 step" in done.stdout
    # Refusing is the correct answer to one of the three tasks.
    assert "points); an agent that does nothing: 33.3%" in done.stdout
    _, step = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert step["trials/graded"] == 8 and step["env/all/tool_calls"] > 0 and step["tokens/trained"] > 0
    # The sampler and the trainer have the same weights.
    assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3


def test_the_terminal_quick_start_fine_tunes_another_model(tmp_path: Path) -> None:
    model = tmp_path / "other-model"
    shutil.copytree(ROOT / "datasets" / "quickstart" / "model", model)
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "scripts.run_skyrl_tx", "quickstart=terminal"),
        *(f"model_name={model}", f"log_path={run}", "max_steps=1", "batch_size=2", "group_size=4"),
        *("eval_tasks=datasets/quickstart/heldout/write-51", "eval_group_size=1"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    # If the model solves every trial after the fine-tuning, RL reports that it had nothing to train on.
    assert not done.stderr or done.stderr.startswith("error: nothing was trained in 1 step: "), done.stderr
    assert done.returncode == (1 if done.stderr else 0), done.stdout
    nll = [
        values["test/nll"]
        for line in (tmp_path / "run.sft" / "metrics.jsonl").read_text().splitlines()
        if "test/nll" in (values := json.loads(line))
    ]
    # The model was trained on such demonstrations before, so its NLL is already near the minimum.
    assert len(nll) >= 2 and nll[-1] < 0.2
    [*_, fine_tuned] = (tmp_path / "run.sft" / "checkpoints.jsonl").read_text().splitlines()
    config = json.loads((run / "config.json").read_text())
    assert config["load_checkpoint_path"] == json.loads(fine_tuned)["state_path"]
    assert not config["load_optimizer"]
    assert config["tasks_dir"] == str(tmp_path / "run.server" / "tasks")
    [*_, step] = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert step["trials/graded"] == 8


def test_an_unknown_option_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.run_skyrl_tx", f"log_path={tmp_path / 'run'}", "learning_rat=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "run_skyrl_tx: unknown option 'learning_rat'; did you mean learning_rate?\n",
    )
    assert list(tmp_path.iterdir()) == []
