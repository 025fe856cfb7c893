"""Run the real tau2-bench, installed in the directory TAU2_HOME, through `src/envs/service/tau2.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ConfigError
from src.core.trajectory import StopReason
from src.envs.message_env import StepResult
from src.envs.service import subprocess_pool, tau2
from src.envs.service.service_env import REFUSAL, ServiceEnv
from src.envs.service.task_files import TaskDefinition
from src.envs.service.user_simulator import STOP, Tools, UserSimulator
from tests.fakes.tau2 import FixedJudge, tool_call_text

pytestmark = pytest.mark.skipif(
    "TAU2_HOME" not in os.environ, reason="TAU2_HOME is unset: scripts/setup_tau.sh creates the directory"
)


class Script:
    """A user that ends the conversation after its lines."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    async def reply(self, conversation: Sequence[object]) -> str:
        return self.lines.pop(0) if self.lines else STOP


async def episode(
    domain: str,
    task: str,
    answers: Sequence[str],
    *,
    user: UserSimulator,
    step_timeout_s: float = 60.0,
    judge: FixedJudge | None = None,
) -> list[StepResult]:
    """Return the step results of the real benchmark for the answers. The last answer is repeated."""
    settings = tau2.worker_settings(
        Path(os.environ["TAU2_HOME"]), num_workers=1, step_timeout_s=step_timeout_s
    )
    selected = next(
        item for item in tau2.official_tasks(settings, domain, "base") if item.row["task"] == task
    )
    async with aclosing(subprocess_pool.WorkerPool(settings)) as pool:
        context = tau2.Tau2Context(
            pool=pool, make_user=lambda instructions, tools, seed: user, grading="all", judge=judge
        )
        env = ServiceEnv(tau2.Tau2Episode(selected, 0, context), parallel_tool_calls=True)
        await env.start()
        observations: list[StepResult] = []
        while not observations or not observations[-1].is_done:
            observations.append(await env.step(answers[min(len(observations), len(answers) - 1)]))
        await env.close()
        return observations


async def test_gold_actions_have_reward_1_and_refusals_0():
    gold = tool_call_text("create_task", user_id="user_1", title="Important Meeting")
    last = (await episode("mock", "create_task_1", [gold, "Done."], user=Script("I need a task.")))[-1]
    assert (last.reward, last.metrics["reward_db"], last.metrics["no_write_action"]) == (1.0, 1.0, 0.0)
    last = (await episode("mock", "create_task_1", [REFUSAL], user=Script("I need a task.")))[-1]
    assert (last.reward, last.metrics["no_write_action"]) == (0.0, 1.0)


async def test_defined_tasks_run_in_the_real_benchmark():
    settings = tau2.worker_settings(Path(os.environ["TAU2_HOME"]), num_workers=1, step_timeout_s=60.0)
    gold: dict[str, Any] = {"name": "create_task", "arguments": {"user_id": "user_1", "title": "Tea"}}
    definition = TaskDefinition(instruction="You want a task called Tea.", actions=[gold], facts=["four"])
    [task] = tau2.defined_tasks(settings, "mock", {"mine": definition})
    assert (task.id, task.has_writes, task.row["needs_judge"]) == ("mock/mine", True, False)
    instructions: list[str] = []

    def make_user(text: str, tools: Tools, seed: int) -> UserSimulator:
        instructions.append(text)
        return Script("Hello.")

    async with aclosing(subprocess_pool.WorkerPool(settings)) as pool:
        for answers, reward in (
            ([tool_call_text("create_task", user_id="user_1", title="Tea"), "It is at Four."], 1.0),
            ([REFUSAL], 0.0),
        ):
            env = ServiceEnv(
                tau2.Tau2Episode(task, 0, tau2.Tau2Context(pool=pool, make_user=make_user, grading="all"))
            )
            await env.start()
            observations = [await env.step(answer) for answer in answers]
            assert observations[-1].is_done and observations[-1].reward == reward
            await env.close()
    assert "You want a task called Tea." in instructions[0]
    with pytest.raises(
        ConfigError, match="the defined tasks of mock: ValueError: mine: there is no tool fly"
    ):
        tau2.defined_tasks(
            settings, "mock", {"mine": replace(definition, actions=[{"name": "fly", "arguments": {}}])}
        )
    for arguments in ({"user_id": "user_1"}, {**gold["arguments"], "colour": None}):
        with pytest.raises(
            ConfigError,
            match=r"mine: create_task has the parameters user_id, title, description \(required: .*\), but "
            r"the gold action has the arguments user_id",
        ):
            tau2.defined_tasks(
                settings, "mock", {"mine": replace(definition, actions=[{**gold, "arguments": arguments}])}
            )


async def test_a_real_retail_call_ends_at_its_deadline():
    endless = tool_call_text("calculate", expression="9**9**9")
    [last] = await episode("retail", "0", [endless], user=Script("Hello."), step_timeout_s=2.0)
    assert (last.reward, last.stop_reason) == (0.0, StopReason.TIMEOUT)


@pytest.mark.parametrize(("met", "reward"), [(True, 1.0), (False, 0.0)])
async def test_real_assertions_use_the_configured_judge(met: bool, reward: float):
    settings = tau2.worker_settings(Path(os.environ["TAU2_HOME"]), num_workers=1, step_timeout_s=60)
    task = next(item for item in tau2.official_tasks(settings, "retail", "test") if item.row["needs_judge"])
    actions, num_assertions = task.row["gold_actions"], task.row["num_assertions"]
    assert isinstance(actions, list) and isinstance(num_assertions, int)
    verdict = {"expectedOutcome": "x", "reasoning": "y", "metExpectation": met}
    judge = FixedJudge(json.dumps({"results": [verdict] * num_assertions}))
    answers = [*(tool_call_text(action["name"], **action["arguments"]) for action in actions), "Done."]
    last = (await episode("retail", str(task.row["task"]), answers, user=Script("Hello."), judge=judge))[-1]
    assert (last.reward, last.metrics["reward_nl_assertion"], len(judge.requests)) == (reward, reward, 1)
