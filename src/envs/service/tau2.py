"""Sierra's own tau2-bench: its tasks, tools and grading in worker processes of its own Python, the customer played on this side.

scripts/setup_tau.sh makes the folder that `tau2_home` names (docs/tau-bench.md). Nothing here imports tau2: the package of that name on
PyPI is another one, and what the benchmark pins conflicts with what Harbor needs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol
from uuid import uuid4

from src.core.errors import AgentFault, ConfigError, SandboxError, VerifierError
from src.core.trajectory import StopReason, Task, ZeroReason
from src.envs.message_env import ResetResult
from src.envs.service import tau2_worker
from src.envs.service.domain import Grade, Reaction, names_of
from src.envs.service.subprocess_pool import Reply, WorkerPool, WorkerSettings, WorkerTimeout
from src.envs.service.task_files import Definition
from src.envs.service.tool_calls import ToolCall, parse
from src.envs.service.user_simulator import Customer, ScriptedCustomer, Tools
from src.policy.chat import Message
from src.policy.openai_client import Reply as JudgesReply

logger = logging.getLogger(__name__)

WORKER_MEMORY_MB = 4096
LISTING_TIMEOUT_S = 300.0
NUM_CONSENTS = 6  # of a scripted customer, before it leaves
STOP_REASONS = {"max_steps": StopReason.MAX_TURNS}  # of tau2's endings, those that a limit forced

Grading = Literal["all", "env"]
GRADINGS: tuple[Grading, ...] = ("all", "env")
SPLITS: dict[str, tuple[str, str | None]] = {  # domain -> the official splits to train on and to hold out
    "retail": ("train", "test"),
    "airline": ("train", "test"),
    "telecom": ("train", "test"),
    "mock": ("base", None),
}


class JudgesAssertions(Protocol):
    """The part of `ChatEndpoint` that judges what a task asserts in natural language."""

    async def reply(
        self, messages: Sequence[Message], *, temperature: float, seed: int | None
    ) -> JudgesReply: ...


MakeCustomer = Callable[
    [str, Tools, int], Customer
]  # of the official instructions, the customer's own tools, and a seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau2Parts:
    """What all episodes share. `grading` is tau2's own word: `all` is the benchmark's reward, `env` what of it compares end states."""

    pool: WorkerPool
    make_customer: MakeCustomer
    grading: Grading
    judge: JudgesAssertions | None = None
    max_steps: int = 200
    max_errors: int = 10


class Tau2Episode:
    """One attempt at one task of the benchmark. Implements `ServiceEpisode`."""

    def __init__(self, task: Task, seed: int, parts: Tau2Parts) -> None:
        self._task = task
        self._seed = seed
        self._parts = parts
        self._name = uuid4().hex
        self._session = parts.pool.session(farewell={"op": "drop", "episode": self._name})
        self._customer: Customer | None = None
        self._customer_tools: Tools = ()
        self._heard: list[Message] = []  # the conversation as the customer knows it
        self._num_tool_errors = self._num_customer_errors = self._num_writes = 0
        self._is_stuck = False

    async def start(self) -> ResetResult:
        row, parts = self._task.row, self._parts
        limits = {"max_steps": parts.max_steps, "max_errors": parts.max_errors}
        opened = await self._ask(
            "reset", domain=row["domain"], task=row["task"], definition=row.get("definition"), **limits
        )
        self._customer_tools = opened["customer_tools"]
        self._customer = parts.make_customer(opened["customer_prompt"], self._customer_tools, self._seed)
        state = await self._until_agent(opened)
        if state["turn"] == tau2_worker.OVER:
            raise SandboxError("the customer left before the agent had said anything")
        messages = [{"role": "system", "content": opened["agent_prompt"]}, *state["messages"]]
        return ResetResult(messages=messages, tools=opened["agent_tools"], use_native_tool_calling=True)

    async def step(self, content: str, calls: Sequence[ToolCall]) -> Reaction:
        """A call that never ends, for which two workers were killed, ends the episode instead."""
        errors_before = self._num_tool_errors
        try:
            state = await self._say(content, calls)
        except WorkerTimeout:
            if not calls:
                raise
            self._is_stuck = True
            return Reaction(is_done=True)
        except SandboxError as error:  # what the agent called ended two workers, or cannot be done
            if not calls:
                raise
            raise AgentFault(ZeroReason.ENV_ERROR, str(error)) from error
        num_errors = self._num_tool_errors - errors_before
        state = await self._until_agent(state)
        return Reaction(
            messages=state["messages"], is_done=state["turn"] == tau2_worker.OVER, num_errors=num_errors
        )

    async def grade(self) -> Grade:
        """The official evaluator's reward, by the name of what it counts. VerifierError where a judge was needed and gave no verdict."""
        if self._is_stuck:
            return Grade(
                reward=0.0,
                stop_reason=StopReason.TIMEOUT,
                metrics=self._metrics(0.0) | {"tool_timeouts": 1.0},
            )
        reply = await self._ask("finish", grading=self._parts.grading, judged=None)
        if "ask" in reply:
            if self._parts.judge is None:
                raise VerifierError(
                    f"{self._task.id} needs a judge; set judge_model and judge_base_url, or grading=env"
                )
            judged = await self._parts.judge.reply(reply["ask"], temperature=0.0, seed=0)
            reply = await self._ask("finish", grading=self._parts.grading, judged=judged.text)
        if reply["eval_error"]:
            logger.warning(
                "%s: tau2 could not evaluate the episode, which is reward 0 then: %s",
                self._task.id,
                reply["eval_error"],
            )
        metrics = self._metrics(reply["reward"]) | {
            f"reward_{basis.lower()}": value for basis, value in reply["breakdown"].items()
        }
        metrics |= {"eval_errors": float(reply["eval_error"] is not None)}
        return Grade(
            reward=float(reply["reward"]), stop_reason=STOP_REASONS.get(reply["termination"]), metrics=metrics
        )

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, op: str, **arguments: object) -> Reply:
        return await self._session.ask({"op": op, "episode": self._name, **arguments})

    async def _say(self, content: str, calls: Sequence[ToolCall]) -> Reply:
        """The next message of whoever's turn it is."""
        record = [{"name": call.name, "arguments": call.arguments} for call in calls]
        state = await self._ask("step", content=content or None, tool_calls=record)
        self._num_tool_errors, self._num_writes = state["tool_errors"], state["writes"]
        return state

    async def _until_agent(self, state: Reply) -> Reply:
        """What the agent hears next, or the words that the customer left with."""
        assert self._customer is not None
        errors_before = self._num_tool_errors
        while state["turn"] == tau2_worker.CUSTOMER:
            self._heard += state["messages"]
            said = await self._customer.reply(self._heard)
            parsed = parse(said, names_of(self._customer_tools)) if self._customer_tools else None
            state = (
                await self._say(parsed.content, parsed.calls)
                if parsed and parsed.calls
                else await self._say(said, ())
            )
            if state["turn"] == tau2_worker.OVER:
                state = {**state, "messages": [{"role": "user", "content": said}]}
        self._num_customer_errors += self._num_tool_errors - errors_before
        return state

    def _metrics(self, reward: float) -> dict[str, float]:
        customers = {"customer_tool_errors": float(self._num_customer_errors)} if self._customer_tools else {}
        return {
            f"reward_{self._parts.grading}": reward,
            "no_write_action": float(self._num_writes == 0),
        } | customers


def scripted_customer(instructions: str, tools: Tools, seed: int) -> Customer:
    """Recites its scenario and agrees to whatever it is asked. There is nothing to draw, and it uses no tools."""
    scenario = instructions.rpartition("<scenario>")[2].partition("</scenario>")[0]
    return ScriptedCustomer([scenario.strip(), *["Yes, please go ahead."] * NUM_CONSENTS])


def worker_settings(home: Path, *, num_workers: int, step_timeout_s: float) -> WorkerSettings:
    """How the benchmark in `home` is played. ConfigError where it is not set up."""
    python, data = home / "venv" / "bin" / "python", home / "source" / "data"
    if not python.exists() or not data.is_dir():
        raise ConfigError(
            f"tau2_home {home} holds no tau2-bench; run scripts/setup_tau.sh, and set TAU2_HOME to the folder it names"
        )
    return WorkerSettings(
        command=[str(python), "-I", str(Path(tau2_worker.__file__)), str(WORKER_MEMORY_MB)],
        environment={"TAU2_DATA_DIR": str(data)},
        num_workers=num_workers,
        step_timeout_s=step_timeout_s,
    )


def official_tasks(settings: WorkerSettings, domain: str, split: str | None) -> list[Task]:
    """The tasks of an official split, None: all of the domain's. Blocking. ConfigError with the benchmark's words where it cannot say."""
    return _tasks(settings, domain, what=f"the {split or 'known'} tasks", split=split)


def defined_tasks(settings: WorkerSettings, domain: str, definitions: Mapping[str, Definition]) -> list[Task]:
    """Tasks in a domain of the benchmark that are not its own, by id. Blocking. ConfigError for actions that it does not have."""
    records = {name: {"id": name, **asdict(definition)} for name, definition in definitions.items()}
    found = _tasks(
        settings, domain, what="the tasks that rows define", split=None, definitions=list(records.values())
    )
    return [
        replace(task, row={**task.row, "definition": record})
        for task, record in zip(found, records.values(), strict=True)
    ]


def _tasks(settings: WorkerSettings, domain: str, *, what: str, **arguments: object) -> list[Task]:
    """What a worker of its own says of them."""
    request = {"id": 1, "timeout_s": LISTING_TIMEOUT_S, "op": "tasks", "domain": domain, **arguments}
    environment = {**os.environ, **settings.environment}
    said = json.dumps(request) + "\n"
    listing = subprocess.run(
        settings.command, input=said, env=environment, capture_output=True, text=True, check=False
    )
    replies = [json.loads(line) for line in listing.stdout.splitlines()]
    problems = [reply["error"] for reply in replies if "error" in reply] or (
        [] if len(replies) == 2 else [listing.stderr[-300:]]
    )
    if problems:
        raise ConfigError(f"tau2 cannot list {what} of {domain}: {problems[0]}")
    path = Path(settings.environment["TAU2_DATA_DIR"]) / "tau2" / "domains" / domain / "tasks.json"
    rows = [{**row, "domain": domain, "task": row["id"]} for row in replies[1]["tasks"]]
    return [
        Task(id=f"{domain}/{row['id']}", path=path, domain=domain, row=row, gold_writes=row["gold_writes"])
        for row in rows
    ]


def graded_by(grading: Grading, tasks: Sequence[Task]) -> list[Task]:
    """Rates of success carry the name of a partial grading, which needs no judge."""
    return (
        list(tasks)
        if grading == "all"
        else [replace(task, grading=grading, row={**task.row, "needs_judge": False}) for task in tasks]
    )


def gradable(tasks: Sequence[Task], *, has_judge: bool) -> list[Task]:
    """Those that can be graded in full; the others are left out, and counted."""
    kept = [task for task in tasks if has_judge or not task.row.get("needs_judge")]
    if len(kept) < len(tasks):
        left_out = len(tasks) - len(kept)
        logger.warning(
            "tau2: %d of %d tasks need a judge (judge_model, judge_base_url) and are left out",
            left_out,
            len(tasks),
        )
    return kept
