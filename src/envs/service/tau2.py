"""Sierra's tau2-bench. Its tasks, tools and grading run in worker processes with a separate Python
environment. User simulators run in this process.

scripts/setup_tau.sh creates the directory that `tau2_home` names (docs/tau-bench.md). This module does not
import tau2: the package of that name on PyPI is unrelated, and the benchmark's pinned dependencies conflict
with Harbor's.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from src.core.errors import AgentFault, ConfigError, SandboxError, VerifierError
from src.core.trajectory import StopReason, Task, ZeroReason
from src.envs.message_env import ResetResult
from src.envs.service import tau2_worker
from src.envs.service.call_forms import text_parameters
from src.envs.service.service_env import ActionResult, Grade
from src.envs.service.subprocess_pool import (
    RequestFailed,
    WorkerPool,
    WorkerReply,
    WorkerSettings,
    WorkerTimeout,
)
from src.envs.service.task_files import TaskDefinition
from src.envs.service.tool_calls import ToolCall, parse
from src.envs.service.user_simulator import ScriptedUserSimulator, Tools, UserSimulator
from src.policy.chat import Message
from src.policy.openai_client import ChatModel

logger = logging.getLogger(__name__)

WORKER_MEMORY_MB = 4096
LISTING_TIMEOUT_S = 300.0
# The number of steps of tau2's orchestrator, and the number of tool errors, that end an episode.
LIMITS = {"max_steps": 200, "max_errors": 10}
NUM_CONSENTS = 6  # the number of times a scripted user agrees before it ends the conversation
# Termination reason of tau2 -> stop reason. For other termination reasons, the stop reason is that of the
# last answer.
STOP_REASONS = {"max_steps": StopReason.MAX_TURNS}

Grading = Literal["all", "env"]
GRADINGS: tuple[Grading, ...] = ("all", "env")
SPLITS: dict[str, tuple[str, str | None]] = {  # domain -> the official splits to train on and to hold out
    "retail": ("train", "test"),
    "airline": ("train", "test"),
    "telecom": ("train", "test"),
    "mock": ("base", None),
}


# (official instructions, tools of the user, seed) -> user simulator
UserSimulatorFactory = Callable[[str, Tools, int], UserSimulator]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau2Context:
    """The resources and settings that all episodes share.

    `grading` is a term of tau2: `all` is the full reward, and `env` is the part that checks the end state.
    """

    pool: WorkerPool
    make_user: UserSimulatorFactory
    grading: Grading
    judge: ChatModel | None = (
        None  # for natural-language assertions; None: tasks that need a judge cannot be graded
    )


class Tau2Episode:
    """One trial of one task of the benchmark. Implements `ServiceEpisode`."""

    def __init__(self, task: Task, seed: int, context: Tau2Context) -> None:
        self._task = task
        self._seed = seed
        self._context = context
        self._name = uuid4().hex
        self._session = context.pool.session(close_request={"op": "drop", "episode": self._name})
        self._user: UserSimulator | None = None
        self._user_tools: Tools = ()
        self._user_view: list[Message] = []  # the conversation as the user simulator sees it
        self._num_tool_errors = self._num_user_tool_errors = self._num_writes = 0
        self._has_timed_out = False

    async def start(self) -> ResetResult:
        row, context = self._task.row, self._context
        opened = await self._ask(
            "reset", domain=row["domain"], task=row["task"], definition=row.get("definition"), **LIMITS
        )
        self._user_tools = opened["user_tools"]
        self._user = context.make_user(opened["user_prompt"], self._user_tools, self._seed)
        state = await self._until_agent(opened)
        if state["speaker"] == tau2_worker.OVER:
            raise SandboxError("the user simulator ended the conversation before the agent's first turn")
        messages = [{"role": "system", "content": opened["agent_prompt"]}, *state["messages"]]
        return ResetResult(messages=messages, tools=opened["agent_tools"], use_native_tool_calling=True)

    async def step(self, content: str, calls: Sequence[ToolCall]) -> ActionResult:
        """Process one answer of the agent. Raises AgentFault if the worker rejects the calls, or if the
        calls end more workers than an episode may end. If the last of these workers exceeded its deadline,
        the episode ends with the reward 0 instead.
        """
        errors_before = self._num_tool_errors
        try:
            state = await self._send_message(content, calls)
        except RequestFailed as error:  # the worker rejected the calls, or the calls ended it
            if not calls:
                raise
            if isinstance(error, WorkerTimeout):
                self._has_timed_out = True
                return ActionResult(is_done=True)
            raise AgentFault(ZeroReason.ENV_ERROR, str(error)) from error
        num_errors = self._num_tool_errors - errors_before
        state = await self._until_agent(state)
        return ActionResult(
            messages=state["messages"], is_done=state["speaker"] == tau2_worker.OVER, num_errors=num_errors
        )

    async def grade(self) -> Grade:
        """Return the reward of the official evaluator.

        The reward is 0 if calls of the agent exceeded their deadline or tau2 cannot evaluate the episode.
        Raises VerifierError if the task needs a judge and there is none, and RequestFailed if the judge's
        reply is invalid.
        """
        if self._has_timed_out:
            return Grade(
                reward=0.0,
                stop_reason=StopReason.TIMEOUT,
                metrics=self._metrics(0.0) | {"tool_timeouts": 1.0},
            )
        reply = await self._ask("finish", grading=self._context.grading, judge_reply=None)
        if "judge_request" in reply:
            if self._context.judge is None:
                raise VerifierError(
                    f"{self._task.id} needs a judge; set judge_model and judge_base_url, or use grading=env"
                )
            judge_reply = await self._context.judge.reply(reply["judge_request"], temperature=0.0, seed=0)
            reply = await self._ask("finish", grading=self._context.grading, judge_reply=judge_reply.text)
        if reply["eval_error"]:
            logger.warning(
                "%s: tau2 could not evaluate the episode, so its reward is 0: %s",
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

    async def _ask(self, op: str, **arguments: object) -> WorkerReply:
        return await self._session.ask({"op": op, "episode": self._name, **arguments})

    async def _send_message(self, content: str, calls: Sequence[ToolCall]) -> WorkerReply:
        """Send the message of the agent or of the user, whichever speaks next."""
        record = [{"name": call.name, "arguments": call.arguments} for call in calls]
        state = await self._ask("step", content=content or None, tool_calls=record)
        self._num_tool_errors, self._num_writes = state["tool_errors"], state["writes"]
        return state

    async def _until_agent(self, state: WorkerReply) -> WorkerReply:
        """Send messages of the user simulator until the agent speaks next or the conversation is over.

        Return the last state. If the conversation ended after a message of the user simulator, `messages` of
        this state contains only this message.
        """
        assert self._user is not None
        errors_before = self._num_tool_errors
        while state["speaker"] == tau2_worker.USER:
            self._user_view += state["messages"]
            text = await self._user.reply(self._user_view)
            texts = text_parameters(self._user_tools)
            parsed = parse(text, set(texts), text_parameters=texts) if texts else None
            state = (
                await self._send_message(parsed.content, parsed.calls)
                if parsed and parsed.calls
                else await self._send_message(text, ())
            )
            if state["speaker"] == tau2_worker.OVER:
                state = {**state, "messages": [{"role": "user", "content": text}]}
        self._num_user_tool_errors += self._num_tool_errors - errors_before
        return state

    def _metrics(self, reward: float) -> dict[str, float]:
        user_metrics = {"user_tool_errors": float(self._num_user_tool_errors)} if self._user_tools else {}
        return {
            f"reward_{self._context.grading}": reward,
            "no_write_action": float(self._num_writes == 0),
        } | user_metrics


def scripted_user(instructions: str, tools: Tools, seed: int) -> UserSimulator:
    """Return a user simulator that states its scenario, agrees NUM_CONSENTS times and then ends the
    conversation.

    The user simulator depends neither on the tools nor on the seed.
    """
    scenario = instructions.rpartition("<scenario>")[2].partition("</scenario>")[0]
    return ScriptedUserSimulator([scenario.strip(), *["Yes, please go ahead."] * NUM_CONSENTS])


def worker_settings(home: Path, *, num_workers: int, step_timeout_s: float) -> WorkerSettings:
    """Return the settings of workers for the benchmark in `home`.

    Raises ConfigError if the benchmark is not installed there.
    """
    python, data = home / "venv" / "bin" / "python", home / "source" / "data"
    if not python.exists() or not data.is_dir():
        raise ConfigError(
            f"tau2_home {home} contains no tau2-bench; run scripts/setup_tau.sh, and set TAU2_HOME to the "
            "directory it prints"
        )
    return WorkerSettings(
        command=[str(python), "-I", str(Path(tau2_worker.__file__)), str(WORKER_MEMORY_MB)],
        environment={"TAU2_DATA_DIR": str(data)},
        num_workers=num_workers,
        step_timeout_s=step_timeout_s,
    )


def official_tasks(settings: WorkerSettings, domain: str, split: str | None) -> list[Task]:
    """Return the tasks of an official split, or of all splits if `split` is None.

    This call blocks. Raises ConfigError with the benchmark's message if the tasks cannot be listed.
    """
    return _tasks(settings, domain, description=f"the {split or 'official'} tasks", split=split)


def defined_tasks(
    settings: WorkerSettings, domain: str, definitions: Mapping[str, TaskDefinition]
) -> list[Task]:
    """Return a task of the domain for each definition.

    This call blocks. Raises ConfigError for gold actions that no tool of the domain accepts.
    """
    records = {name: {"id": name, **asdict(definition)} for name, definition in definitions.items()}
    tasks = _tasks(
        settings, domain, description="the defined tasks", split=None, definitions=list(records.values())
    )
    return [
        replace(task, row={**task.row, "definition": record})
        for task, record in zip(tasks, records.values(), strict=True)
    ]


def _tasks(settings: WorkerSettings, domain: str, *, description: str, **arguments: object) -> list[Task]:
    """List tasks with a worker process that ends afterwards."""
    request = {"id": 1, "timeout_s": LISTING_TIMEOUT_S, "op": "tasks", "domain": domain, **arguments}
    environment = {**os.environ, **settings.environment}
    listing = subprocess.run(
        settings.command,
        input=json.dumps(request) + "\n",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    replies = [json.loads(line) for line in listing.stdout.splitlines()]
    problems = [reply["error"] for reply in replies if "error" in reply] or (
        []
        if len(replies) == 2
        else [listing.stderr[-300:].strip() or f"its worker ended with status {listing.returncode}"]
    )
    if problems:
        raise ConfigError(
            f"tau2 cannot list {description} of {domain}: {problems[0]}; check tau2_home, or run "
            "scripts/setup_tau.sh again"
        )
    path = Path(settings.environment["TAU2_DATA_DIR"]) / "tau2" / "domains" / domain / "tasks.json"
    rows: list[dict[str, Any]] = [{**row, "domain": domain, "task": row["id"]} for row in replies[1]["tasks"]]
    return [
        Task(id=f"{domain}/{row['id']}", path=path, domain=domain, row=row, has_writes=row["has_writes"])
        for row in rows
    ]


def with_grading(grading: Grading, tasks: Sequence[Task]) -> list[Task]:
    """Set `Task.grading` to `grading` unless it is `all`. If `grading` is `env`, metric names contain `env`,
    and no task needs a judge."""
    return (
        list(tasks)
        if grading == "all"
        else [replace(task, grading=grading, row={**task.row, "needs_judge": False}) for task in tasks]
    )


def gradable_tasks(tasks: Sequence[Task], *, has_judge: bool) -> list[Task]:
    """Return the tasks that can be graded. Without a judge, log how many tasks are skipped because they need
    one."""
    kept = [task for task in tasks if has_judge or not task.row.get("needs_judge")]
    if len(kept) < len(tasks):
        logger.warning(
            "tau2: %d of %d tasks need a judge (judge_model, judge_base_url) and are skipped",
            len(tasks) - len(kept),
            len(tasks),
        )
    return kept
