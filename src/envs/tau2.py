"""Sierra's own tau2-bench as an environment: its tasks, tools and grading in worker processes of its own Python, the customer played here.

scripts/setup_tau.sh makes the folder that `tau2_home` names (docs/tau-bench.md). Nothing here imports tau2: the package of that name on
PyPI is another one, and what the benchmark pins conflicts with what Harbor needs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from uuid import uuid4

from src.chat import Message
from src.endpoint import Reply as JudgesReply
from src.envs import tau2_worker
from src.envs.customers import Customer, ScriptedCustomer, Tools, names_of
from src.envs.tool_calls import Parsed, ToolCall, parse
from src.envs.workers import Reply, WorkerPool, WorkerSettings, WorkerTimeout
from src.errors import ConfigError, VerifierError
from src.generator import Observation, Opening
from src.trajectory import StopReason, Task

logger = logging.getLogger(__name__)

STOP = "###STOP###"
WORKER_MEMORY_MB = 4096
LISTING_TIMEOUT_S = 300.0
UNUSABLE_EMPTY = "Error: the message was empty. Write to the customer, or call a function."
UNUSABLE_CALL = "Error: the function call cannot be read: {}"
STOP_REASONS = {"max_steps": StopReason.MAX_TURNS, "timeout": StopReason.TIMEOUT}  # of tau2's endings, those that a limit forced

DomainName = Literal["retail", "airline", "telecom", "mock"]
Grading = Literal["all", "env"]
SPLITS: dict[str, tuple[str, str | None]] = {  # training, held out
    "retail": ("train", "test"),
    "airline": ("train", "test"),
    "telecom": ("train", "test"),
    "mock": ("base", None),
}


class JudgesAssertions(Protocol):
    """The part of `ChatEndpoint` that judges what a task asserts in natural language."""

    async def reply(self, messages: Sequence[Message], *, temperature: float, seed: int | None) -> JudgesReply: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau2Settings:
    """`grading` is tau2's own word: `all` is the benchmark's reward, `env` only the part of it that compares end states."""

    grading: Grading
    parallel_tool_calls: bool = False  # all calls of one answer are executed; else the first
    max_steps: int = 200
    max_errors: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau2Parts:
    """What all episodes share: the workers, who plays customers (of their instructions and a seed), and who judges, where somebody does."""

    pool: WorkerPool
    make_customer: Callable[[str, int], Customer]
    judge: JudgesAssertions | None = None


class Tau2Env:
    """One attempt at one task of the benchmark."""

    def __init__(self, task: Task, seed: int, parts: Tau2Parts, settings: Tau2Settings) -> None:
        self._task = task
        self._seed = seed
        self._parts = parts
        self._settings = settings
        self._episode = uuid4().hex
        self._session = parts.pool.session(farewell={"op": "drop", "episode": self._episode})
        self._tools: Tools = ()
        self._counts: Counter[str] = Counter()
        self._customer: Customer | None = None
        self._customer_tools: Tools = ()
        self._heard: list[Message] = []  # the conversation as the customer knows it

    async def start(self) -> Opening:
        row, settings = self._task.row, self._settings
        limits = {"max_steps": settings.max_steps, "max_errors": settings.max_errors}
        opened = await self._ask("reset", domain=row["domain"], task=row["task"], **limits)
        self._tools, self._customer_tools = opened["agent_tools"], opened["customer_tools"]
        self._heard = [{"role": "system", "content": opened["customer_prompt"]}]
        self._customer = self._parts.make_customer(opened["customer_prompt"], self._seed)
        state = await self._until_agent(opened)
        if state["turn"] == tau2_worker.OVER:
            raise VerifierError("the customer left before the agent had said anything")
        messages = [{"role": "system", "content": opened["agent_prompt"]}, *state["messages"]]
        return Opening(messages=messages, tools=self._tools, use_native_tool_calling=True)

    async def step(self, answer: str) -> Observation:
        parsed = parse(answer, names_of(self._tools))
        self._counts.update({name: int(count) for name, count in parsed.counts.items()})
        calls = parsed.calls if self._settings.parallel_tool_calls else parsed.calls[:1]
        if not calls and (parsed.problem or not parsed.content):
            return self._unusable(parsed)
        try:
            state = await self._say(parsed.content, calls)
        except WorkerTimeout:
            if not calls:
                raise
            self._counts["tool_timeouts"] += 1  # a call that never ends: two workers were killed over it
            return Observation(is_done=True, stop_reason=StopReason.TIMEOUT, metrics=self._metrics())
        state = await self._until_agent(state)
        if state["turn"] == tau2_worker.OVER:
            return await self._graded()
        return Observation(messages=state["messages"], metrics=self._metrics())

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, op: str, **arguments: object) -> Reply:
        return await self._session.ask({"op": op, "episode": self._episode, **arguments})

    async def _say(self, content: str, calls: Sequence[ToolCall]) -> Reply:
        """The next message of whoever's turn it is."""
        record = [{"name": call.name, "arguments": call.arguments} for call in calls]
        state = await self._ask("step", content=content or None, tool_calls=record)
        self._counts["tool_errors"], self._counts["writes"] = state["tool_errors"], state["writes"]
        return state

    async def _until_agent(self, state: Reply) -> Reply:
        assert self._customer is not None
        while state["turn"] == tau2_worker.CUSTOMER:
            self._heard += state["messages"]
            turn = await self._customer.answer(self._heard, self._customer_tools)
            state = await self._say(turn.content, turn.calls)
        return state

    def _unusable(self, parsed: Parsed) -> Observation:
        """tau2 never hears of an answer without a message in it; the agent does, and it is an error like a tool's."""
        self._counts["unusable_answers"] += 1
        is_done = self._counts["unusable_answers"] + self._counts["tool_errors"] >= self._settings.max_errors
        text = UNUSABLE_CALL.format(parsed.problem) if parsed.problem else UNUSABLE_EMPTY
        return Observation(messages=[{"role": "tool", "content": text}], is_done=is_done, metrics=self._metrics())

    async def _graded(self) -> Observation:
        """The official evaluator's reward, under the name of what it counts. VerifierError where a judge was needed and gave no verdict."""
        grading = self._settings.grading
        reply = await self._ask("finish", grading=grading, judged=None)
        if "ask" in reply:
            if self._parts.judge is None:
                raise VerifierError(f"{self._task.id} needs a judge; set judge_model and judge_base_url, or tau2_grading=env")
            judged = await self._parts.judge.reply(reply["ask"], temperature=0.0, seed=0)
            reply = await self._ask("finish", grading=grading, judged=judged.text)
        if reply["eval_error"]:
            logger.warning("%s: tau2 could not evaluate the episode, which counts as reward 0: %s", self._task.id, reply["eval_error"])
            self._counts["eval_errors"] += 1
        reward = float(reply["reward"])
        kind = "success_write" if self._task.row["gold_writes"] else "success_nowrite"
        metrics = self._metrics() | {f"reward_{grading}": reward, kind: reward, "no_write_action_rate": float(not self._counts["writes"])}
        return Observation(reward=reward, is_done=True, stop_reason=STOP_REASONS.get(reply["termination"]), metrics=metrics)

    def _metrics(self) -> dict[str, float]:
        names = ("parse_attempts", "parse_failures", "parse_recovered", "tool_errors", "tool_timeouts", "unusable_answers", "eval_errors")
        return {name: float(self._counts[name]) for name in names}


def scripted_customer(prompt: str, seed: int) -> Customer:
    """One that recites the scenario; there is nothing to draw."""
    scenario = prompt.rpartition("<scenario>")[2].partition("</scenario>")[0]
    return ScriptedCustomer(scenario.strip(), farewell=STOP)


def worker_settings(home: Path, *, num_workers: int, step_timeout_s: float) -> WorkerSettings:
    """How the benchmark in `home` is played. ConfigError where it is not set up."""
    python, data = home / "venv" / "bin" / "python", home / "source" / "data"
    if not python.exists() or not data.is_dir():
        raise ConfigError(f"tau2_home {home} holds no tau2-bench; run scripts/setup_tau.sh, and set TAU2_HOME to the folder it names")
    return WorkerSettings(
        command=[str(python), str(Path(tau2_worker.__file__)), str(WORKER_MEMORY_MB)],
        environment={"TAU2_DATA_DIR": str(data), "PYTHONDONTWRITEBYTECODE": ""},
        num_workers=num_workers,
        step_timeout_s=step_timeout_s,
    )


def official_tasks(settings: WorkerSettings, home: Path, domain: str, split: str) -> list[Task]:
    """The tasks of an official split, from a worker of its own. Blocking. ConfigError with its words where it cannot say."""
    request = {"id": 1, "timeout_s": LISTING_TIMEOUT_S, "op": "tasks", "domain": domain, "split": split}
    listing = subprocess.run(
        settings.command,
        input=json.dumps(request) + "\n",
        env={**os.environ, **settings.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    replies = [json.loads(line) for line in listing.stdout.splitlines()]
    if problem := next((reply["error"] for reply in replies if "error" in reply), None if len(replies) == 2 else listing.stderr[-300:]):
        raise ConfigError(f"tau2 cannot list the {split} tasks of {domain}: {problem}")
    path = home / "source" / "data" / "tau2" / "domains" / domain / "tasks.json"
    rows = [{**row, "domain": domain, "task": row["id"]} for row in replies[1]["tasks"]]
    return [Task(id=f"{domain}/{row['id']}", path=path, domain=domain, row=row) for row in rows]


def gradable(tasks: Sequence[Task], *, grading: Grading, has_judge: bool) -> list[Task]:
    """Those that can be graded in full; the others are left out, and counted."""
    if grading == "env" or has_judge:
        return list(tasks)
    kept = [task for task in tasks if not task.row["needs_judge"]]
    if len(kept) < len(tasks):
        left_out = len(tasks) - len(kept)
        logger.warning("tau2: %d of %d tasks need a judge (judge_model, judge_base_url) and are left out", left_out, len(tasks))
    return kept
