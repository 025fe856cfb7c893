"""Check `env=tau_bench` with the installed tau2-bench: gold actions (the reference solution of each task),
agents that refuse everything, adversarial answers, and load.

    TAU2_HOME=... .venv/bin/python -m scripts.check_tau2 [CHECK ...] [domains=retail,...]

CHECK is gold, refusals, adversarial or load. The checks adversarial and load run only if the domains include
retail. The episodes run in `ServiceEnv`, with its parser of tool calls and with tau2 in worker processes. The
official evaluator grades them, except those that `ServiceEnv` ends because of errors or that exceed a
deadline. The program prints one line per figure. Its exit status is 1 if a figure differs from its expected
value.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from src.core.trajectory import StopReason, Task
from src.envs.message_env import StepResult
from src.envs.service.service_env import REFUSAL, ServiceEnv
from src.envs.service.subprocess_pool import WorkerPool, WorkerSettings
from src.envs.service.tau2 import (
    GRADINGS,
    SPLITS,
    Grading,
    Tau2Context,
    Tau2Episode,
    gradable_tasks,
    official_tasks,
    with_grading,
    worker_settings,
)
from src.envs.service.user_simulator import STOP, Tools, UserSimulator
from src.policy.chat import Message

CHECKS = ("gold", "refusals", "adversarial", "load")
NUM_WORKERS = 4
NUM_EPISODES = 64
STEP_TIMEOUT_S = 60.0
HELP = "I need help."
# For each (domain, grading): the number of tasks that an agent solves by refusing everything, and the number
# of all tasks, as in docs/tau-bench.md. Telecom uses the split `small`.
SOLVED_BY_REFUSING: dict[tuple[str, Grading], tuple[int, int]] = {
    ("retail", "env"): (11, 114),
    ("airline", "all"): (23, 50),
    ("airline", "env"): (24, 50),
    ("telecom", "all"): (0, 20),
}
# An action that a task of the domain `mock` requires although its gold actions do not contain it.
COMPLETE_TASK = {
    "requestor": "assistant",
    "name": "update_task_status",
    "arguments": {"task_id": "task_2", "status": "completed"},
}
ADDITIONAL_ACTIONS = {"update_task_with_history_and_env_assertions": [COMPLETE_TASK]}
# The criteria of this task contradict each other: the assertion requires a read notification, and the
# gold database contains an unread one.
CONTRADICTORY = "mock/update_task_with_user_tools"
DISMISS_NOTIFICATION = {
    "requestor": "user",
    "name": "dismiss_notification",
    "arguments": {"notification_id": "notif_1"},
}


class Script:
    """An agent and a user simulator that together execute the gold actions of a task, then its
    ADDITIONAL_ACTIONS and `more_actions`. The agent's last message contains the facts in `communicate_info`,
    and the user then ends the conversation."""

    def __init__(self, task: Task, *more_actions: Mapping[str, object]) -> None:
        additional = ADDITIONAL_ACTIONS.get(str(task.row["task"]), ())
        self._actions = [*task.row["gold_actions"], *additional, *more_actions]  # type: ignore[misc]
        self._facts: Sequence[str] = task.row["communicate_info"]  # type: ignore[assignment]
        self._has_finished = False

    def answer(self) -> str:
        """Return the agent's next answer."""
        if self._actions and self._actions[0]["requestor"] == "assistant":
            return tool_call(self._actions.pop(0))
        self._has_finished = not self._actions
        return f"Done: {', '.join(self._facts)}." if self._has_finished else "Please go on."

    async def reply(self, conversation: Sequence[Message]) -> str:
        """Return the user's next message."""
        if (
            self._actions
            and self._actions[0]["requestor"] == "user"
            and any(message["role"] == "assistant" for message in conversation[1:])
        ):
            return tool_call(self._actions.pop(0))
        return STOP if self._has_finished else HELP


class ImpatientUser:
    """A user who asks for help `patience` times and then ends the conversation."""

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience

    async def reply(self, conversation: Sequence[Message]) -> str:
        messages = [
            message for message in conversation if message["role"] == "user" and not message.get("tool_calls")
        ]
        return STOP if len(messages) >= self._patience else HELP


def tool_call(action: Mapping[str, object]) -> str:
    """Return an action as the text of a tool call."""
    return f"<tool_call>{json.dumps({'name': action['name'], 'arguments': action['arguments']})}</tool_call>"


async def run_episode(
    task: Task, pool: WorkerPool, grading: Grading, user: UserSimulator, answer: Callable[[], str]
) -> StepResult:
    """Run an episode with the agent's answers from `answer`. Return the result of the last step."""

    def make_user(instructions: str, tools: Tools, seed: int) -> UserSimulator:
        return user

    env = ServiceEnv(
        Tau2Episode(task, 0, Tau2Context(pool=pool, make_user=make_user, grading=grading)),
        parallel_tool_calls=True,
    )
    try:
        await env.start()
        while True:
            observation = await env.step(answer())
            if observation.is_done:
                return observation
    finally:
        await env.close()


async def rewards(tasks: Sequence[Task], pool: WorkerPool, grading: Grading, *, gold: bool) -> list[float]:
    """Return the rewards of an agent that executes the gold actions, or of one that refuses everything."""
    concurrency = asyncio.Semaphore(2 * NUM_WORKERS)

    async def reward(task: Task) -> float:
        async with concurrency:
            script = Script(task)
            user, answer = (script, script.answer) if gold else (ImpatientUser(2), lambda: REFUSAL)
            return (await run_episode(task, pool, grading, user, answer)).reward

    return list(await asyncio.gather(*(reward(task) for task in tasks)))


def report(label: str, actual: object, *, expected: object) -> bool:
    """Print a figure. Return whether it has the expected value."""
    is_right = actual == expected
    print(
        f"{label:<56} {actual!s:<28} {'' if is_right else f'WRONG: expected {expected}'}".rstrip(), flush=True
    )
    return is_right


async def check_gold(pool: WorkerPool, domains: Mapping[str, Sequence[Task]]) -> bool:
    """Check that the gold actions of every task except CONTRADICTORY get the reward 1 with each grading.
    Tasks that need a judge are left out. CONTRADICTORY has its own check."""
    all_right = True
    for domain, all_tasks in domains.items():
        tasks = [task for task in all_tasks if task.id != CONTRADICTORY]
        for task in all_tasks:
            all_right &= task.id != CONTRADICTORY or await check_contradiction(pool, task)
        for grading in reversed(GRADINGS):
            graded = gradable_tasks(with_grading(grading, tasks), has_judge=False)
            started = time.monotonic()
            actual = await rewards(graded, pool, grading, gold=True)
            failed = [task.id for task, reward in zip(graded, actual, strict=True) if reward != 1.0]
            label = f"gold {domain} reward_{grading} ({time.monotonic() - started:.0f} s)"
            all_right &= report(
                label, f"{actual.count(1.0)}/{len(actual)}", expected=f"{len(actual)}/{len(actual)}"
            )
            if failed:
                print(f"  not 1.0: {', '.join(failed[:5])}")
    return all_right


async def check_contradiction(pool: WorkerPool, task: Task) -> bool:
    """Check a task with contradictory criteria: the gold actions alone pass the database check and fail the
    assertion, and with DISMISS_NOTIFICATION they pass the assertion and fail the database check."""
    all_right = True
    for more_actions, expected in (((), (1.0, 0.0)), ((DISMISS_NOTIFICATION,), (0.0, 1.0))):
        script = Script(task, *more_actions)
        metrics = (await run_episode(task, pool, "all", script, script.answer)).metrics
        label = f"{task.id} {'with' if more_actions else 'without'} dismissal: db, assertion"
        all_right &= report(label, (metrics["reward_db"], metrics["reward_env_assertion"]), expected=expected)
    return all_right


async def check_refusals(
    pool: WorkerPool, settings: WorkerSettings, domains: Mapping[str, Sequence[Task]]
) -> bool:
    """Check the number of tasks that an agent solves by refusing everything."""
    all_right = True
    for (domain, grading), (solved, total) in SOLVED_BY_REFUSING.items():
        if domain not in domains:
            continue
        tasks = official_tasks(settings, domain, "small") if domain == "telecom" else domains[domain]
        actual = await rewards(tasks, pool, grading, gold=False)
        all_right &= report(
            f"refuse everything {domain} reward_{grading}",
            f"{actual.count(1.0)}/{len(actual)}",
            expected=f"{solved}/{total}",
        )
    return all_right


async def check_adversarial(settings: WorkerSettings, tasks: Sequence[Task]) -> bool:
    """Check invalid and hostile answers on a retail task that an agent cannot solve by refusing
    everything.
    """
    task = next(task for task in tasks if task.row["has_writes"] and not task.row["needs_judge"])
    endless = tool_call({"name": "calculate", "arguments": {"expression": "9**9**9"}})
    unknown = tool_call({"name": "no_such_tool", "arguments": {}})
    # Label -> (answers of the agent, of which the last is repeated; the user's patience; expected metrics;
    # expected stop reason).
    cases = {
        "unknown tool, ten times": ([unknown], 9, {"tool_errors": 10.0}, None),
        "wrong arguments": (
            [tool_call({"name": "get_order_details", "arguments": {"x": 1}}), REFUSAL],
            2,
            {"tool_errors": 1.0},
            None,
        ),
        "arguments are a list": (
            [tool_call({"name": "get_order_details", "arguments": [1]}), REFUSAL],
            2,
            {"parse_failures": 1.0},
            None,
        ),
        "call cut inside a string": (
            ['{"name": "get_order_details", "arguments": {"order', REFUSAL],
            2,
            {"parse_failures": 1.0},
            None,
        ),
        "empty, ten times": ([""], 9, {"unusable_answers": 10.0}, None),
        "text beside a call": (["One moment. " + unknown, REFUSAL], 2, {"tool_errors": 1.0}, None),
        "two calls": ([unknown + unknown, REFUSAL], 2, {"tool_errors": 2.0}, None),
        'calculate("9**9**9")': ([endless], 9, {"tool_timeouts": 1.0}, StopReason.TIMEOUT),
        "transfer to a human": (
            [tool_call({"name": "transfer_to_human_agents", "arguments": {"summary": "no"}}), REFUSAL],
            2,
            {},
            None,
        ),
        "the agent says ###STOP###": ([STOP], 9, {"eval_errors": 0.0}, None),
    }
    all_right = True
    short = replace(settings, step_timeout_s=2.0)
    pool, short_pool = WorkerPool(replace(settings, num_workers=1)), WorkerPool(short)
    async with aclosing(pool), aclosing(short_pool):
        for label, (answers, patience, metrics, stop_reason) in cases.items():
            remaining = iter(answers)
            case_pool = short_pool if stop_reason is StopReason.TIMEOUT else pool
            started = time.monotonic()
            last = await run_episode(
                task,
                case_pool,
                "env",
                ImpatientUser(patience),
                lambda remaining=remaining, answers=answers: next(remaining, answers[-1]),
            )
            actual = {name: last.metrics.get(name) for name in metrics}
            all_right &= report(
                f"{label} ({time.monotonic() - started:.1f} s)",
                (last.reward, last.stop_reason, actual),
                expected=(0.0, stop_reason, metrics),
            )
    return all_right


async def check_load(settings: WorkerSettings, tasks: Sequence[Task]) -> bool:
    """Check that 64 concurrent episodes on four workers get the reward 1 if the agents execute the gold
    actions. Repeat the check while four workers are killed, one every half second."""
    gold_tasks = [task for task in tasks if not task.row["needs_judge"]]
    gold_tasks = [gold_tasks[number % len(gold_tasks)] for number in range(NUM_EPISODES)]
    all_right = True
    for num_kills in (0, NUM_WORKERS):
        async with aclosing(WorkerPool(settings)) as pool:
            await rewards(gold_tasks[:NUM_WORKERS], pool, "all", gold=True)  # starts the workers
            scripts, started = [Script(task) for task in gold_tasks], time.monotonic()
            episodes = [
                asyncio.create_task(run_episode(task, pool, "all", script, script.answer))
                for task, script in zip(gold_tasks, scripts, strict=True)
            ]
            for number in range(num_kills):
                await asyncio.sleep(0.5)
                os.kill(pool.pids[number % len(pool.pids)], signal.SIGKILL)
            results = await asyncio.gather(*episodes, return_exceptions=True)
            duration_s = time.monotonic() - started
            num_right = sum(isinstance(result, StepResult) and result.reward == 1.0 for result in results)
            memory = sum(peak_mib(pid) for pid in pool.pids)
        label = f"{NUM_EPISODES} at once, {NUM_WORKERS} workers, {num_kills} killed"
        all_right &= report(label, num_right, expected=NUM_EPISODES)
        print(
            f"  {duration_s:.1f} s, {NUM_EPISODES / duration_s:.1f} episodes/s, workers' peak resident "
            f"memory {memory:.0f} MiB"
        )
    return all_right


def peak_mib(pid: int) -> float:
    """Return the peak resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


async def main(argv: Sequence[str]) -> int:
    home = os.environ.get("TAU2_HOME")
    if home is None:
        print("set TAU2_HOME to the directory that scripts/setup_tau.sh has created", file=sys.stderr)
        return 2
    names = next(
        (word.partition("=")[2].split(",") for word in argv if word.startswith("domains=")), list(SPLITS)
    )
    checks = [word for word in argv if "=" not in word] or list(CHECKS)
    if unknown := set(checks) - {*CHECKS}:
        print(f"unknown check {min(unknown)!r}; use {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    settings = worker_settings(Path(home), num_workers=NUM_WORKERS, step_timeout_s=STEP_TIMEOUT_S)
    domains = {name: official_tasks(settings, name, "base") for name in names}
    all_right = True
    async with aclosing(WorkerPool(settings)) as pool:
        if "gold" in checks:
            all_right &= await check_gold(pool, domains)
        if "refusals" in checks:
            all_right &= await check_refusals(pool, settings, domains)
    if "adversarial" in checks and "retail" in domains:
        all_right &= await check_adversarial(settings, domains["retail"])
    if "load" in checks and "retail" in domains:
        all_right &= await check_load(settings, domains["retail"])
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
