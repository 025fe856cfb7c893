"""Runs `python -m src.train` against a real server, with Terminus-2 in real sandboxes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.envs.sandbox.bubblewrap import missing_packages
from tests.fakes.run import groups_trained
from tests.fakes.tiny_model import CONFIG, QUICK_TO_COMPILE, make_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "datasets" / "quickstart"

pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason=f"the sandbox needs {' '.join(missing_packages())}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with the tokenizer of the quick start."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    tokenizer = json.loads((QUICKSTART / "model" / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    make_model(directory, dataclasses.replace(CONFIG, vocab_size=max(ids) + 1, max_position_embeddings=2048))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / "model" / name, directory / name)
    return directory


def start_server(
    model_dir: Path, checkpoints_dir: Path, *, port: int = 0
) -> tuple[subprocess.Popen[str], str]:
    """Start the server. Returns its process and its URL when it is ready."""
    options = {
        "base_model": model_dir,
        "model_alias": "local/tiny",
        "port": port,
        "max_lora_rank": 8,
        "max_num_seqs": 8,
    }
    options |= {"checkpoints_dir": checkpoints_dir, "train_tokens_per_batch": 2048}
    arguments = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "skyrl_tx_server", *arguments]
    environment = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if "server ready: " in line:
            return process, line.partition("server ready: ")[2].split()[0]
    pytest.fail("the server did not start: " + "".join(output))


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url = start_server(model_dir, tmp_path_factory.mktemp("checkpoints"))
    yield url
    process.terminate()
    process.communicate(timeout=30)


def command(url: str, model_dir: Path, log_path: Path, *options: str) -> list[str]:
    base_options = [
        *(
            "backend=skyrl-tx",
            f"skyrl_tx_url={url}",
            "model_name=local/tiny",
            f"tokenizer={model_dir}",
            "lora_rank=4",
        ),
        *(
            f"tasks_dir={QUICKSTART / 'train'}",
            "eval_tasks=count-01",
            "environment_type=sandbox",
            f"log_path={log_path}",
        ),
        *(
            "context_limit=2000",
            "max_tokens=24",
            "max_turns=2",
            "enable_summarize=false",
            "temperature=1",
            "kl_penalty_coef=0.1",
        ),
        *(
            "batch_size=2",
            "group_size=2",
            "num_substeps=2",
            "eval_group_size=1",
            "eval_every=0",
            "save_every=0",
        ),
    ]
    return [sys.executable, "-m", "src.train", *base_options, *options]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_continues_and_saves_at_sigint(url: str, model_dir: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "run"
    done = subprocess.run(
        command(url, model_dir, log_path, "max_steps=2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 steps in" in done.stdout and "held-out success:" in done.stdout
    assert done.stderr == ""
    metrics = lines(log_path / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert metrics[1]["trials/graded"] == 4 and metrics[1]["env/all/turns"] == 2
    assert metrics[2]["optim/num_substeps"] == 2 and metrics[2]["optim/grad_norm"] > 0
    # The sampler and the trainer have the same weights.
    assert metrics[1]["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3
    assert metrics[2]["sampling_client/step_min"] == 1
    assert len(lines(log_path / "rollouts" / "step_000002.jsonl")) == 4

    resume_command = command(
        url, model_dir, log_path, "max_steps=19", "loss_fn=cispo", "behavior_if_log_dir_exists=resume"
    )
    text = ""
    with subprocess.Popen(resume_command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as resumed:
        assert resumed.stdout is not None
        for line in resumed.stdout:
            text += line
            if line.startswith("step 4:"):
                resumed.send_signal(signal.SIGINT)
    assert resumed.returncode == 130, text
    assert "resuming after step 2" in text
    # The run may finish further steps before it handles the signal.
    (last,) = map(int, re.findall(r"checkpoint after step (\d+): tinker://", text))
    assert last >= 3
    assert [record["batch"] for record in lines(log_path / "checkpoints.jsonl")] == [2, last]
    assert [record["step"] for record in lines(log_path / "metrics.jsonl")] == list(range(last + 1))


def test_a_run_completes_after_a_restart_of_its_server(model_dir: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "run"
    server, url = start_server(model_dir, tmp_path / "checkpoints")
    options = ("max_steps=2", "save_every=1", "heartbeat_timeout_s=5", "num_substeps=1")
    text = ""
    with subprocess.Popen(
        command(url, model_dir, log_path, *options), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            text += line
            if line.startswith("step 2:") and server.poll() is None and "server lost" not in text:
                server.kill()
                server.communicate()
                server, new_url = start_server(
                    model_dir, tmp_path / "checkpoints", port=int(url.rpartition(":")[2])
                )
                assert new_url == url
    server.terminate()
    server.communicate(timeout=30)
    assert trainer.returncode == 0, text
    assert "server lost or request failed: " in text, text
    assert "resuming after step 1" in text and "done: 2 steps in" in text, text
    assert [record["step"] for record in lines(log_path / "metrics.jsonl")] == [0, 1, 2]
    assert set(groups_trained(log_path).values()) == {1}
    assert [line["state"] for line in lines(log_path / "journal.jsonl") if line["event"] == "ended"] == [
        "done"
    ]


def test_the_base_model_is_evaluated_over_both_apis(url: str, model_dir: Path, tmp_path: Path) -> None:
    shared = [
        f"tasks_dir={QUICKSTART / 'train'}",
        "tasks=count-01,copy-01",
        "model_name=local/tiny",
        "environment_type=sandbox",
    ]
    shared += ["context_limit=2000", "max_tokens=24", "max_turns=2", "enable_summarize=false", "n_samples=2"]

    def evaluate(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "src.evaluate", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)

    tinker_run = evaluate(
        *shared,
        "backend=skyrl-tx",
        f"skyrl_tx_url={url}",
        f"tokenizer={model_dir}",
        f"log_path={tmp_path / 'tinker'}",
    )
    openai_run = evaluate(
        *shared,
        f"base_url={url}/v1",
        f"log_path={tmp_path / 'openai'}",
        f"compare_with={tmp_path / 'tinker'}",
    )
    for done in (tinker_run, openai_run):
        assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
        assert "pass@1: " in done.stdout and "trials: 4 graded" in done.stdout
    assert "paired over 2 tasks" in openai_run.stdout
    for name in ("tinker", "openai"):
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert [task["graded"] for task in results["tasks"]] == [2, 2]
        assert results["metrics"]["test/env/all/turns"] == 2
        assert (
            json.loads((tmp_path / name / "jobs" / "eval_000000" / "result.json").read_text())[
                "n_total_trials"
            ]
            == 4
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model_name=org/other"], "error: model_name=org/other is not served at "),
        (
            ["lora_rank=16"],
            "error: creating an adapter of rank 16 on local/tiny: "
            "LoRA rank 16 is above this server's max_lora_rank=8",
        ),
        (["tasks_dir=/no/such/directory"], "error: tasks_dir /no/such/directory is not a directory"),
        (
            ["eval_tasks=nothing-like-this"],
            "error: eval_tasks: 'nothing-like-this' matches no task; give ids or globs",
        ),
    ],
)
def test_invalid_options_stop_with_one_line_before_any_work(
    url: str, model_dir: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    log_path = tmp_path / "run"
    done = subprocess.run(
        command(url, model_dir, log_path, *options), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (1, 2)
    [line] = done.stderr.splitlines()
    assert line.startswith(message)
    assert not log_path.exists()
