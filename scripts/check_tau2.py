"""Checks the adapter to tau2-bench against what the benchmark itself gives: gold replay, do-nothing floors, adversarial answers, load.

    TAU2_HOME=... .venv/bin/python -m scripts.check_tau2 [gold] [floors] [adversarial] [load] [domains=retail,airline,telecom,mock]

Every episode goes the whole way: the agent's text through the parser and `ServiceEnv`, a worker, the official evaluator. Prints a line per
figure and ends with status 1 where one of them is not what it has to be.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from src.core.trajectory import StopReason, Task
from src.envs.message_env import StepResult
from src.envs.service.domain import DECLINES, ServiceEnv
from src.envs.service.subprocess_pool import WorkerPool, WorkerSettings, worker_pool
from src.envs.service.tau2 import (
    GRADINGS,
    SPLITS,
    Grading,
    Tau2Episode,
    Tau2Parts,
    gradable,
    graded_by,
    official_tasks,
    worker_settings,
)
from src.envs.service.user_simulator import STOP, Customer, Tools
from src.policy.chat import Message

NUM_WORKERS = 4
NUM_EPISODES = 64
STEP_TIMEOUT_S = 60.0
HELP = "I need help."
# (domain, grading) -> tasks that doing nothing solves, of all: docs/tau-bench.md. Telecom's split is `small`, where refusing wins nothing.
FLOORS: dict[tuple[str, Grading], tuple[int, int]] = {
    ("retail", "env"): (11, 114),
    ("airline", "all"): (23, 50),
    ("airline", "env"): (24, 50),
    ("telecom", "all"): (0, 20),
}
# What a mock task wants in words beyond its gold actions.
COMPLETES = {
    "requestor": "assistant",
    "name": "update_task_status",
    "arguments": {"task_id": "task_2", "status": "completed"},
}
UNWRITTEN = {"update_task_with_history_and_env_assertions": [COMPLETES]}
# A mock task that contradicts itself: its assertion wants a notification read, its gold database wants it unread. Nothing earns 1.0.
CONTRADICTORY = "mock/update_task_with_user_tools"
DISMISSES = {"requestor": "user", "name": "dismiss_notification", "arguments": {"notification_id": "notif_1"}}


class Script:
    """Both sides of a conversation that does what the gold actions say, tells what is to be told, and ends."""

    def __init__(self, task: Task, *more: Mapping[str, object]) -> None:
        self._actions = [*task.row["gold_actions"], *UNWRITTEN.get(str(task.row["task"]), ()), *more]  # type: ignore[misc]
        self._facts: Sequence[str] = task.row["communicate_info"]  # type: ignore[assignment]
        self._has_told = False

    def answer(self) -> str:
        """The agent's."""
        if self._actions and self._actions[0]["requestor"] == "assistant":
            return called(self._actions.pop(0))
        self._has_told = not self._actions
        return f"Done: {', '.join(self._facts)}." if self._has_told else "Please go on."

    async def reply(self, conversation: Sequence[Message]) -> str:
        """The customer's."""
        if (
            self._actions
            and self._actions[0]["requestor"] == "user"
            and any(message["role"] == "assistant" for message in conversation[1:])
        ):
            return called(self._actions.pop(0))
        return STOP if self._has_told else HELP


class Declined:
    """A customer who leaves once it was refused; with `patience`, after so many answers."""

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience

    async def reply(self, conversation: Sequence[Message]) -> str:
        said = [
            message for message in conversation if message["role"] == "user" and not message.get("tool_calls")
        ]
        return STOP if len(said) >= self._patience else HELP


def called(action: Mapping[str, object]) -> str:
    return f"<tool_call>{json.dumps({'name': action['name'], 'arguments': action['arguments']})}</tool_call>"


async def play(
    task: Task, pool: WorkerPool, grading: Grading, customer: Customer, answer: Callable[[], str]
) -> StepResult:
    def make_customer(instructions: str, tools: Tools, seed: int) -> Customer:
        return customer

    env = ServiceEnv(
        Tau2Episode(task, 0, Tau2Parts(pool=pool, make_customer=make_customer, grading=grading)),
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
    slots = asyncio.Semaphore(2 * NUM_WORKERS)

    async def reward(task: Task) -> float:
        async with slots:
            script = Script(task)
            customer, answer = (script, script.answer) if gold else (Declined(2), lambda: DECLINES)
            return (await play(task, pool, grading, customer, answer)).reward

    return list(await asyncio.gather(*(reward(task) for task in tasks)))


def say(what: str, found: object, *, wanted: object) -> bool:
    is_right = found == wanted
    print(f"{what:<56} {found!s:<28} {'' if is_right else f'WRONG: expected {wanted}'}".rstrip(), flush=True)
    return is_right


async def check_gold(pool: WorkerPool, domains: Mapping[str, Sequence[Task]]) -> bool:
    good = True
    for domain, all_tasks in domains.items():
        tasks = [task for task in all_tasks if task.id != CONTRADICTORY]
        for task in all_tasks:
            good &= task.id != CONTRADICTORY or await check_contradiction(pool, task)
        for grading in reversed(GRADINGS):
            gradable_tasks = gradable(graded_by(grading, tasks), has_judge=False)
            started = time.monotonic()
            found = await rewards(gradable_tasks, pool, grading, gold=True)
            failed = [task.id for task, reward in zip(gradable_tasks, found, strict=True) if reward != 1.0]
            what = f"gold {domain} reward_{grading} ({time.monotonic() - started:.0f} s)"
            good &= say(what, f"{found.count(1.0)}/{len(found)}", wanted=f"{len(found)}/{len(found)}")
            if failed:
                print(f"  not 1.0: {', '.join(failed[:5])}")
    return good


async def check_contradiction(pool: WorkerPool, task: Task) -> bool:
    """Whichever end state the conversation leads to, one half of the grading refuses it."""
    good = True
    for more, wanted in (((), (1.0, 0.0)), ((DISMISSES,), (0.0, 1.0))):
        script = Script(task, *more)
        metrics = (await play(task, pool, "all", script, script.answer)).metrics
        what = f"{task.id} {'with' if more else 'without'} dismissal: db, assertion"
        good &= say(what, (metrics["reward_db"], metrics["reward_env_assertion"]), wanted=wanted)
    return good


async def check_floors(
    pool: WorkerPool, settings: WorkerSettings, domains: Mapping[str, Sequence[Task]]
) -> bool:
    good = True
    for (domain, grading), (solved, total) in FLOORS.items():
        if domain not in domains:
            continue
        tasks = official_tasks(settings, domain, "small") if domain == "telecom" else domains[domain]
        found = await rewards(tasks, pool, grading, gold=False)
        good &= say(
            f"do nothing {domain} reward_{grading}",
            f"{found.count(1.0)}/{len(found)}",
            wanted=f"{solved}/{total}",
        )
    return good


async def check_adversarial(settings: WorkerSettings, tasks: Sequence[Task]) -> bool:
    """What C4 of the reference lists, each on a retail task that doing nothing does not solve."""
    task = next(task for task in tasks if task.row["gold_writes"] and not task.row["needs_judge"])
    endless = called({"name": "calculate", "arguments": {"expression": "9**9**9"}})
    unknown = called({"name": "no_such_tool", "arguments": {}})
    cases = {  # answers (the last one again and again), customer's patience -> reward, stop reason, metrics
        "unknown tool, ten times": ([unknown], 9, {"tool_errors": 10.0}, None),
        "wrong arguments": (
            [called({"name": "get_order_details", "arguments": {"x": 1}}), DECLINES],
            2,
            {"tool_errors": 1.0},
            None,
        ),
        "arguments are a list": (
            [called({"name": "get_order_details", "arguments": [1]}), DECLINES],
            2,
            {"parse_failures": 1.0},
            None,
        ),
        "call cut inside a string": (
            ['{"name": "get_order_details", "arguments": {"order', DECLINES],
            2,
            {"parse_failures": 1.0},
            None,
        ),
        "empty, ten times": ([""], 9, {"unusable_answers": 10.0}, None),
        "text beside a call": (["One moment. " + unknown, DECLINES], 2, {"tool_errors": 1.0}, None),
        "two calls": ([unknown + unknown, DECLINES], 2, {"tool_errors": 2.0}, None),
        'calculate("9**9**9")': ([endless], 9, {"tool_timeouts": 1.0}, StopReason.TIMEOUT),
        "transfer to a human": (
            [called({"name": "transfer_to_human_agents", "arguments": {"summary": "no"}}), DECLINES],
            2,
            {},
            None,
        ),
        "the agent says ###STOP###": ([STOP], 9, {"eval_errors": 0.0}, None),
    }
    good = True
    short = replace(settings, step_timeout_s=2.0)
    async with worker_pool(replace(settings, num_workers=1)) as pool, worker_pool(short) as short_pool:
        for what, (answers, patience, metrics, stop_reason) in cases.items():
            left = iter(answers)
            where = short_pool if stop_reason is StopReason.TIMEOUT else pool
            started = time.monotonic()
            last = await play(
                task,
                where,
                "env",
                Declined(patience),
                lambda left=left, answers=answers: next(left, answers[-1]),
            )
            found = {name: last.metrics.get(name) for name in metrics}
            good &= say(
                f"{what} ({time.monotonic() - started:.1f} s)",
                (last.reward, last.stop_reason, found),
                wanted=(0.0, stop_reason, metrics),
            )
    return good


async def check_load(settings: WorkerSettings, tasks: Sequence[Task]) -> bool:
    """64 gold episodes at once on four workers, one of which is killed every second."""
    chosen = [task for task in tasks if not task.row["needs_judge"]]
    chosen = [chosen[number % len(chosen)] for number in range(NUM_EPISODES)]
    good = True
    for num_kills in (0, NUM_WORKERS):
        async with worker_pool(settings) as pool:
            await rewards(chosen[:NUM_WORKERS], pool, "all", gold=True)  # workers are up
            scripts, started = [Script(task) for task in chosen], time.monotonic()
            playing = [
                asyncio.create_task(play(task, pool, "all", script, script.answer))
                for task, script in zip(chosen, scripts, strict=True)
            ]
            for number in range(num_kills):
                await asyncio.sleep(0.5)
                os.kill(pool.pids[number % len(pool.pids)], signal.SIGKILL)
            done = await asyncio.gather(*playing, return_exceptions=True)
            took = time.monotonic() - started
            num_right = sum(isinstance(one, StepResult) and one.reward == 1.0 for one in done)
            memory = sum(peak_mib(pid) for pid in pool.pids)
        what = f"{NUM_EPISODES} at once, {NUM_WORKERS} workers, {num_kills} killed"
        good &= say(what, num_right, wanted=NUM_EPISODES)
        print(
            f"  {took:.1f} s, {NUM_EPISODES / took:.1f} episodes/s, workers' peak resident memory {memory:.0f} MiB"
        )
    return good


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


async def main(argv: Sequence[str]) -> int:
    home = os.environ.get("TAU2_HOME")
    if home is None:
        print("set TAU2_HOME to the folder that scripts/setup_tau.sh made", file=sys.stderr)
        return 2
    names = next(
        (word.partition("=")[2].split(",") for word in argv if word.startswith("domains=")), list(SPLITS)
    )
    checks = [word for word in argv if "=" not in word] or ["gold", "floors", "adversarial", "load"]
    settings = worker_settings(Path(home), num_workers=NUM_WORKERS, step_timeout_s=STEP_TIMEOUT_S)
    domains = {name: official_tasks(settings, name, "base") for name in names}
    good = True
    async with worker_pool(settings) as pool:
        if "gold" in checks:
            good &= await check_gold(pool, domains)
        if "floors" in checks:
            good &= await check_floors(pool, settings, domains)
    if "adversarial" in checks and "retail" in domains:
        good &= await check_adversarial(settings, domains["retail"])
    if "load" in checks and "retail" in domains:
        good &= await check_load(settings, domains["retail"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
