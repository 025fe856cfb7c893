"""env=fleet: tasks with a verifier, whose agent uses the tools of an MCP server. docs/fleet.md describes it.

Each trial opens a session with the MCP server at the setting `url`. This URL can contain the placeholders
{env_key} and {env_version}, for fields of the task. An answer without a tool call is the final answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.core.errors import AgentFault, ConfigError, EnvServerError, SandboxError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.episodes import EnvSpec, episodes
from src.envs.fleet.mcp_session import CallFailed, CallRejected, McpSession, ToolResult
from src.envs.fleet.tasks import read_tasks
from src.envs.fleet.verifier import verify
from src.envs.message_env import ResetResult
from src.envs.options import EnvironmentOptions
from src.envs.service.service_env import ActionResult, Grade, ServiceEnv, do_nothing
from src.envs.service.task_files import require_disjoint
from src.envs.service.tau_bench import number, one_of
from src.envs.service.tool_calls import ToolCall
from src.policy.chat import Chat, Message

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
VERIFIER_TIMEOUT_S = 60.0
MAX_RESULT_CHARS = 16_000
# A task whose verifier always returns 1. `check` grades it to test the verifier's sandbox.
PROBE = Task(
    id="probe",
    path=Path(__file__),
    row={"verifier_code": "def verify(env): return 1", "verifier_function": "verify"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """The settings of `environment_kwargs` and of the environment variable FLEET_API_KEY."""

    url: str  # URL of the MCP server; the values of a task replace {env_key} and {env_version}
    headers: Mapping[str, str]  # for each request: Authorization if FLEET_API_KEY is set, else empty
    call_timeout_s: float  # time limit of one tool call
    verifier_timeout_s: float  # time limit of a verifier run, without the time of the verifier's tool calls
    max_result_chars: int  # the agent sees at most this many characters of a tool's result
    reset_tool: str  # name of the tool that is called at the start of each trial; empty: none
    verifier_tools: frozenset[str]  # names of the tools that only the verifier can call
    parallel_tool_calls: bool  # execute all tool calls of an answer, not only the first

    @property
    def hidden_tools(self) -> frozenset[str]:
        """The tools that an agent neither sees nor calls."""
        return self.verifier_tools | ({self.reset_tool} if self.reset_tool else set())

    def url_of(self, task: Task) -> str:
        return self.url.replace("{env_key}", str(task.row["env_key"])).replace(
            "{env_version}", str(task.row["env_version"])
        )

    async def connect(self, url: str) -> McpSession:
        """Open a session. Raises EnvServerError."""
        return await McpSession.connect(url, headers=self.headers, call_timeout_s=self.call_timeout_s)


class FleetEpisode:
    """One trial of a task. Implements `ServiceEpisode`."""

    def __init__(self, task: Task, seed: int, settings: FleetSettings) -> None:
        self._task = task
        self._seed = seed
        self._settings = settings
        self._session: McpSession | None = None
        self._tools: Mapping[str, Mapping[str, object]] = {}  # name -> OpenAI schema of a tool of the agent
        self._final_answer = ""

    async def start(self) -> ResetResult:
        """Open the session and call the reset tool. Raises EnvServerError if that fails."""
        settings = self._settings
        self._session = await settings.connect(settings.url_of(self._task))
        tools = await self._session.tools()
        self._tools = {name: tool for name, tool in tools.items() if name not in settings.hidden_tools}
        if settings.reset_tool:
            fields = {
                name: value for name, value in self._task.row.items() if not name.startswith("verifier_")
            }
            result = await self._call_reliably(settings.reset_tool, {**fields, "seed": self._seed})
            if result.is_error:
                raise EnvServerError(f"the reset tool {settings.reset_tool} failed: {result.text:.200}")
        return ResetResult(
            messages=[{"role": "user", "content": self._task.instruction}],
            tools=list(self._tools.values()),
            use_native_tool_calling=True,
        )

    async def step(self, content: str, calls: Sequence[ToolCall]) -> ActionResult:
        if not calls:
            self._final_answer = content
            return ActionResult(is_done=True)
        messages, num_errors = list[Message](), 0
        for call in calls:
            result = await self._call_for_agent(call)
            num_errors += result.is_error
            text = f"Error: {result.text}" if result.is_error else result.text
            messages.append({"role": "tool", "content": shortened(text, self._settings.max_result_chars)})
        return ActionResult(messages=messages, num_errors=num_errors)

    async def grade(self) -> Grade:
        timeout_s = self._settings.verifier_timeout_s
        return Grade(
            reward=await verify(self._task, self._final_answer, self._call_reliably, timeout_s=timeout_s)
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _call_for_agent(self, call: ToolCall) -> ToolResult:
        """Return the result of a call, or an error that the agent reads.

        A call without a valid result becomes an error for the agent if the server still answers, because the
        arguments may be the cause. Raises EnvServerError if the server does not answer.
        """
        if call.name not in self._tools:
            return _error(f"there is no tool {call.name}; the tools are {', '.join(self._tools)}")
        assert self._session is not None
        try:
            return await self._session.call(call.name, call.arguments)
        except CallFailed as error:
            await self._session.ping()
            return _error(str(error))

    async def _call_reliably(self, name: str, arguments: Mapping[str, object]) -> ToolResult:
        """Call a tool for the trainer or the verifier. A rejected call returns a result that is an error.

        Raises EnvServerError if the call fails in any other way.
        """
        assert self._session is not None
        try:
            return await self._session.call(name, arguments)
        except CallRejected as error:
            return _error(str(error))
        except CallFailed as error:
            raise EnvServerError(f"the tool {name} failed: {error}") from error


def open_fleet(config: EnvironmentOptions, chat: Chat) -> TaskSource:
    """Return the task source of env=fleet. Raises ConfigError for an invalid option or task, or if a server
    or the verifier's sandbox does not work.
    """
    settings = read_settings(config)
    tasks = [task for name in config.train_data or () for task in read_tasks(Path(name).expanduser())]
    held_out = [task for name in config.test_data or () for task in read_tasks(Path(name).expanduser())]
    if not tasks and not held_out:
        raise ConfigError("env=fleet needs train_data=FILE.jsonl, or test_data=FILE.jsonl to evaluate")
    require_disjoint(tasks, held_out)
    asyncio.run(check(settings, sorted({settings.url_of(task) for task in (*tasks, *held_out)})))

    def make(task: Task, seed: int) -> ServiceEnv:
        episode = FleetEpisode(task, seed, settings)
        return ServiceEnv(episode, parallel_tool_calls=settings.parallel_tool_calls)

    spec = EnvSpec(
        tasks=tasks,
        held_out=held_out,
        make=make,
        noop_reward=do_nothing,
        reads=("train_data", "test_data"),
    )
    return episodes(config, chat, spec)


def read_settings(config: EnvironmentOptions) -> FleetSettings:
    """Return the settings. Raises ConfigError for an invalid option."""
    options = config.environment_options
    key = os.environ.get("FLEET_API_KEY")
    settings = FleetSettings(
        url=options.pop("url", ""),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        call_timeout_s=number(options, "call_timeout_s", CALL_TIMEOUT_S),
        verifier_timeout_s=number(options, "verifier_timeout_s", VERIFIER_TIMEOUT_S),
        max_result_chars=number(options, "max_result_chars", MAX_RESULT_CHARS),
        reset_tool=options.pop("reset_tool", ""),
        verifier_tools=frozenset(name for name in options.pop("verifier_tools", "").split("+") if name),
        parallel_tool_calls=one_of(options, "parallel_tool_calls", ("false", "true")) == "true",
    )
    if not settings.url.startswith(("http://", "https://")):
        raise ConfigError("env=fleet needs environment_kwargs=url=http://host:port/mcp of an MCP server")
    if options:
        raise ConfigError(
            f"environment_kwargs: env=fleet has no option {next(iter(options))}; remove the option"
        )
    return settings


async def check(settings: FleetSettings, urls: Sequence[str]) -> None:
    """Check the sandbox of verifiers by grading PROBE, and list the tools of each server.

    Raises ConfigError if the sandbox or a server fails, or if the tools of a server do not fit the settings.
    """
    try:
        await verify(PROBE, "", _no_tool, timeout_s=VERIFIER_TIMEOUT_S)
    except (SandboxError, AgentFault) as error:
        raise ConfigError(f"env=fleet cannot run verifiers here: {error}") from error
    for url in urls:
        try:
            session = await settings.connect(url)
            try:
                tools = await session.tools()
            finally:
                await session.close()
        except EnvServerError as error:
            raise ConfigError(f"env=fleet: {error}; start the server, or correct url=") from error
        if missing := sorted(settings.hidden_tools - tools.keys()):
            raise ConfigError(
                f"env=fleet: {url} has no tool {missing[0]}; its tools are {', '.join(tools)}; correct "
                "reset_tool or verifier_tools"
            )
        if tools.keys() <= settings.hidden_tools:
            raise ConfigError(
                f"env=fleet: {url} has no tool for the agent; add one, or shorten verifier_tools"
            )
        if not session.is_stateful and not settings.reset_tool:
            logger.warning(
                "%s gives its sessions no ids, so trials may share the state of the server; set reset_tool "
                "and n_parallel_envs=1",
                url,
            )


def shortened(text: str, max_chars: int) -> str:
    """Truncate a text to `max_chars` characters and append the number of omitted characters.

    >>> shortened("abcd", 3)
    'abc\\n[1 more characters are not shown]'
    """
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters are not shown]"


def _error(text: str) -> ToolResult:
    return ToolResult(text=text, value=text, is_error=True)


async def _no_tool(name: str, arguments: Mapping[str, object]) -> ToolResult:
    return _error("there is no tool")
