"""Runs `python -m src.sft` against a real server, and RL runs that start from the resulting checkpoint or use
it as the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.records import checkpoints
from tests.fakes.run_files import records
from tests.integration import test_examples

server_url = test_examples.url  # a fixture


def options(url: str, directory: Path) -> list[str]:
    return [
        *("backend=skyrl-tx", f"skyrl_tx_url={url}", "model_name=local/quickstart", "lora_rank=8"),
        *("tokenizer=datasets/quickstart/model", "context_limit=2048", f"log_path={directory}"),
    ]


def test_rl_accepts_an_sft_checkpoint_as_start_and_as_teacher(server_url: str, tmp_path: Path) -> None:
    chats = ["data=examples/chats.jsonl", "batch_size=4", "seed=1"]
    output = test_examples.python(
        "-m", "src.sft", *options(server_url, tmp_path / "first"), *chats, "n_epochs=3", "learning_rate=3e-3"
    )
    lines = records(tmp_path / "first" / "metrics.jsonl")
    assert lines[-1]["test/nll"] < lines[0]["test/nll"] - 0.5
    assert lines[1]["optim/loss"] == pytest.approx(lines[1]["sft/nll"], rel=1e-3)
    checkpoint = checkpoints.last(tmp_path / "first")
    assert checkpoint is not None and checkpoint.state_path in output
    loaded = [f"load_checkpoint_path={checkpoint.state_path}", "load_optimizer=false"]

    test_examples.python("-m", "src.sft", *options(server_url, tmp_path / "again"), *chats, *loaded)
    again = records(tmp_path / "again" / "metrics.jsonl")
    assert again[0]["test/nll"] == pytest.approx(lines[-1]["test/nll"], abs=1e-5)

    rl = ["env=examples.count_up:open_count_up", "max_turns=3", "max_tokens=8", "max_steps=1"]
    rl += ["batch_size=2", "group_size=2", "eval_before_train=false", "temperature=1", "reward_coef=0"]
    rl.append(f"teacher={checkpoint.sampler_path}")
    for directory, start in (("from_base", []), ("from_teacher", loaded)):
        test_examples.python("-m", "src.train", *options(server_url, tmp_path / directory), *rl, *start)
    kl_from_base, kl_from_teacher = (
        records(tmp_path / directory / "metrics.jsonl")[-1]["optim/kl_policy_teacher"]
        for directory in ("from_base", "from_teacher")
    )
    # The run "from_teacher" starts with the weights of the teacher, so its KL to the teacher is 0.
    assert kl_from_base > 0.01 and kl_from_teacher == pytest.approx(0, abs=1e-4)
