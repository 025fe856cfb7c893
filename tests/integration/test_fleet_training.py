"""Trains two steps on Fleet tasks (tasks whose tools are on an MCP server, docs/fleet.md) with a real server,
a tiny model and real verifiers. The MCP server exits once, and the environment starts it again.

Each tool name is one character, so that a model with random weights calls tools: a completion of one
character is a tool call.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.core.trajectory import Trajectory
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.policy.chat import load_chat
from src.records.rollout_store import decoded
from tests.fakes.mcp_server import KEYS, mcp_server
from tests.fakes.run_files import records
from tests.fakes.text_engine import save_tokenizer
from tests.fakes.tiny_model import CONFIG, make_model
from tests.integration.test_training import ROOT, start_server

NO_SANDBOX = why_no_sandbox()
pytestmark = pytest.mark.skipif(NO_SANDBOX is not None, reason=f"no sandbox here: {NO_SANDBOX}")
EXIT_AT_CALL = 30  # number of the tool call at which the MCP server exits
VERIFIERS = {
    "keys": "def verify(env): return sum(env.call_tool('export_stock').values()) / 2",
    "words": "def verify(env, final_answer): return ord(final_answer[0]) % 2",
}
NUM_TASKS = 3  # per environment; the last task is held out


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model whose tokens are bytes."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    make_model(directory, dataclasses.replace(CONFIG, max_position_embeddings=2048))
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, url = start_server(model_dir, tmp_path_factory.mktemp("checkpoints"))
    yield url
    process.terminate()
    process.communicate(timeout=30)


def write_tasks(path: Path, numbers: range) -> Path:
    rows = [
        {
            "task_key": f"{env_key}-{number}",
            "env_key": env_key,
            "env_version": "v1",
            "task_modality": "tool_use",
        }
        | {"prompt": f"Press keys, {number}.", "verifier_code": code, "stock": {}}
        for env_key, code in VERIFIERS.items()
        for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(url: str, mcp_url: str, model_dir: Path, directory: Path) -> list[str]:
    options = {
        "backend": "skyrl-tx",
        "skyrl_tx_url": url,
        "model_name": "local/tiny",
        "tokenizer": model_dir,
        "env": "fleet",
        "environment_kwargs": f"url={mcp_url}/{{env_key}}/mcp,reset_tool=reset,verifier_tools=export_stock",
        "train_data": write_tasks(directory / "train.jsonl", range(NUM_TASKS - 1)),
        "test_data": write_tasks(directory / "test.jsonl", range(NUM_TASKS - 1, NUM_TASKS)),
        "log_path": directory / "run",
        "use_native_tool_calling": "true",
        "lora_rank": 4,
        "context_limit": 2000,
        "max_tokens": 1,
        "max_turns": 6,
        "temperature": 1,
        "batch_size": 4,
        "group_size": 4,
        "eval_group_size": 2,
        "n_epochs": 2,
        "eval_every": 0,
        "save_every": 0,
        "n_parallel_envs": 4,
        "trial_attempts": 8,
        "retry_wait_s": 0.5,
    }
    return [sys.executable, "-m", "src.train", *(f"{name}={value}" for name, value in options.items())]


def trajectories(run: Path, batch: str) -> list[Trajectory]:
    results = [decoded(line["result"]) for line in records(run / "finished" / f"{batch}.jsonl")]
    assert all(isinstance(result, Trajectory) for result in results)
    return [result for result in results if isinstance(result, Trajectory)]


def expected_reward(trajectory: Trajectory) -> float:
    """Return the reward that the verifiers compute from the conversation, or 0 without a final answer."""
    last = trajectory.conversation[-1]
    if last["role"] != "assistant":
        return 0.0
    results = [str(m["content"]) for m in trajectory.conversation if m["role"] == "tool"]
    num_calls = sum(not result.startswith("Error") for result in results)
    is_odd = float(ord(str(last["content"]).strip()[0]) % 2)
    return num_calls / 2 if trajectory.task_id.startswith("keys") else is_odd


@pytest.mark.seed_behaviour(140)
def test_training_continues_if_the_mcp_server_exits_once(url: str, model_dir: Path, tmp_path: Path):
    marker = tmp_path / "ended"
    with mcp_server(options=(str(marker), str(EXIT_AT_CALL))) as mcp_url:
        done = subprocess.run(
            command(url, mcp_url, model_dir, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=400
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert marker.exists() and "done: 2 steps in" in done.stdout
    run, chat = tmp_path / "run", load_chat(str(model_dir))

    metrics = records(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert sum(line.get("trials/retries", 0) for line in metrics) >= 1
    for step in (1, 2):
        line = metrics[step]
        assert line["trials/graded"] == 16 and line["optim/grad_norm"] > 0
        # The trainer computes the logprobs of the sampled tokens again, in their contexts.
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-3
        trained = trajectories(run, f"step_{step:06d}")
        assert len(trained) == 16
        for env_key in VERIFIERS:
            positive = [t.reward for t in trained if t.task_id.startswith(env_key) and t.reward > 0]
            mean = sum(positive) / max(1, len(positive))
            assert line[f"reward/{env_key}/mean_positive_reward"] == pytest.approx(mean)
            assert f"reward/{env_key}/variance_per_prompt" in line
        for trajectory in trained:
            check_tokens(trajectory, chat)
            assert trajectory.reward == expected_reward(trajectory), trajectory.conversation
        assert sum(t.metrics.get("tool_calls", 0) for t in trained) > 0

    evaluated = trajectories(run, "eval_000002")
    for env_key in VERIFIERS:
        rewards = [t.reward for t in evaluated if t.task_id.startswith(env_key)]
        assert metrics[-1][f"test/env/{env_key}/reward/total"] == sum(rewards) / 2
        dumped = records(run / "dumped_evals" / "global_step_2_evals" / f"{env_key}.jsonl")
        assert [line["env_extras"]["task_key"] for line in dumped] == [f"{env_key}-{NUM_TASKS - 1}"] * 2
        assert {line["data_source"] for line in dumped} == {env_key}
        assert all(line["input_prompt"].startswith("<tools>get_stock;add_stock;") for line in dumped)
        for message in (message for line in dumped for message in line["conversation"]):
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in KEYS and call["function"]["arguments"] == {}


def check_tokens(trajectory: Trajectory, chat) -> None:
    """Assert that each prompt begins with the tokens of the previous turn, and that the sampled tokens decode
    to the answers of the conversation.
    """
    answers = [str(m["content"]) for m in trajectory.conversation if m["role"] == "assistant"]
    assert [chat.decode(turn.completion_ids) for turn in trajectory.turns] == answers
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        sampled = [*before.prompt_ids, *before.completion_ids]
        assert list(after.prompt_ids)[: len(sampled)] == sampled
        assert len(before.logprobs) == len(before.completion_ids) == 1


def test_an_unreachable_mcp_server_stops_the_run_with_one_line(url: str, model_dir: Path, tmp_path: Path):
    with mcp_server() as mcp_url:
        pass
    done = subprocess.run(
        command(url, mcp_url, model_dir, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and not (tmp_path / "run" / "metrics.jsonl").exists()
    [line] = done.stderr.splitlines()
    assert f"the MCP server at {mcp_url}/keys/mcp cannot be reached" in line
