"""Trains on service episodes with the chat template of Qwen3, native tools and a judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from src.core.errors import NothingTrainedError
from src.envs.registry import open_task_source
from src.loop.connection import Dependencies
from src.policy.chat import load_chat
from src.policy.openai_client import ChatReply
from src.rollouts.judge import MODES
from tests.fakes.backend import BanditBackend
from tests.fakes.run import FakeRun

MODEL = Path(__file__).resolve().parents[2] / "datasets" / "toy_retail" / "model"
QWEN3 = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates" / "qwen3.jinja"


class Judge:
    model = "judge-1"

    def __init__(self) -> None:
        self.conversations: list[str] = []

    async def reply(self, messages, *, temperature, seed):
        self.conversations.append(messages[1]["content"])
        return ChatReply(text=json.dumps(dict.fromkeys(MODES, False)))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("eval_before_train", [True, False])
@pytest.mark.seed_behaviour(59, 69, 95)
async def test_a_run_with_native_tools_and_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_before_train: bool
):
    judge, backend = Judge(), BanditBackend()
    monkeypatch.setattr("src.loop.run.open_endpoint", lambda base_url, model: judge)
    chat = load_chat(str(MODEL))
    monkeypatch.setattr(chat.tokenizer, "chat_template", QWEN3.read_text())
    run = FakeRun(
        tmp_path / "run", lambda config: Dependencies(source=open_task_source(config, chat), backend=backend)
    )
    argv = [
        "env=tau_bench",
        "environment_kwargs=domain=toy_retail",
        "test_data=held=toy_retail:test",
        "use_native_tool_calling=true",
    ]
    argv += [
        "context_limit=8192",
        "max_tokens=4",
        "max_turns=2",
        "batch_size=2",
        "group_size=2",
        "max_steps=1",
        "n_parallel_envs=8",
    ]
    argv += [
        f"eval_before_train={eval_before_train}",
        "taxonomy_feedback=true",
        "judge_model=j",
        "judge_base_url=http://h:1/v1",
    ]
    with pytest.raises(NothingTrainedError, match="in every group, all trials have the same reward"):
        await run.go(*argv)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == ([0, 1] if eval_before_train else [1])
    # The judge receives only training episodes, without the tools of the prompt.
    assert 1 <= len(judge.conversations) <= 4 and "get_order" not in judge.conversations[0]
    assert lines[-1]["reward/avg_shaped_reward"] == lines[-1]["reward/avg_raw_reward"] + 1.0
    assert {
        "test-held/success_rate",
        "test/env/held/pass_hat_2",
        "test/env/held/noop_success",
        "test/noop_success",
    } <= set(lines[-1])
    # The bandit cannot write text.
    assert all(line["test/env/all/success_write"] == 0 for line in lines if "test/noop_success" in line)
    assert "; an agent that does nothing: " in run.text.getvalue()
    dumped = run.lines("dumped_evals/global_step_1_evals/held.jsonl")
    assert all("\n</tools>" in line["input_prompt"] for line in dumped)
    assert all(
        line["input_prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for line in dumped
    )
    conversations = [line["conversation"] for line in dumped]
    assert len(conversations) == 40 and "<|im_" not in json.dumps(conversations)
    assert "<|im_start|>assistant" in dumped[0]["output_response"]
