"""Terminus-2 with a `TinkerLLM` as its language model.

Harbor constructs agents from JSON, which cannot contain a language model. `register_session` therefore stores
the session of each trial, with its model, under a key, and the agent receives the key.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from harbor.agents.terminus_2 import terminus_2
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.agents.terminus_2.terminus_json_plain_parser import ParseResult, TerminusJSONPlainParser
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat
from harbor.models.agent.context import AgentContext

from src.core.errors import SandboxError, TrainerError
from src.core.trajectory import StopReason
from src.envs.harbor.tinker_llm import EpisodeEnd, TinkerLLM
from src.envs.sandbox.environment import environment_works
from src.policy.chat import Message

PROBE_TIMEOUT_S = 20


@dataclass(kw_only=True)
class AgentSession:
    """The state that a trial shares with the agent that Harbor constructs for it."""

    llm: TinkerLLM
    stop_reason: StopReason | None = None  # None: Harbor cancelled the agent, or an error ended it
    error: TrainerError | None = None  # the error that ended the agent and prevents grading
    num_commands: int = 0  # terminal commands; the metric `tool_calls`
    num_parse_failures: int = 0  # answers from which no commands could be parsed


_sessions: dict[str, AgentSession] = {}


@contextmanager
def register_session(key: str, session: AgentSession) -> Generator[None]:
    """Make `session` available to the agent under `key` while the block runs."""
    assert key not in _sessions, f"two trials have the key {key}"
    _sessions[key] = session
    try:
        yield
    finally:
        del _sessions[key]


def first_prompt(instruction: str) -> str:
    """Return the first prompt of Terminus-2 with an empty terminal screen.

    The first prompt of a trial also contains the screen, so it is not shorter than this prompt.
    """
    template = Path(terminus_2.__file__).parent / "templates" / "terminus-json-plain.txt"
    return template.read_text(encoding="utf-8").format(instruction=instruction, terminal_state="")


class AnswerParser(TerminusJSONPlainParser):
    """The parser of Terminus-2. It reports every answer that cannot be parsed in its result."""

    @override
    def parse_response(self, response: str) -> ParseResult:
        try:
            return super().parse_response(response)
        except (ValueError, OverflowError, RecursionError) as error:
            # Numbers with thousands of digits, or deeply nested brackets
            return ParseResult(
                commands=[], is_task_complete=False, error=f"Invalid JSON: {error}", warning=""
            )


def tool_fields(conversation: Sequence[Message]) -> dict[int, Message]:
    """Return `Trajectory.tool_fields`: the commands of the answers as tool calls.

    The names of the tools are those in Harbor's trajectories. Answers that Terminus-2 cannot parse have no
    calls.
    """
    parser, fields = AnswerParser(), dict[int, Message]()
    num_calls = 0
    for index, message in enumerate(conversation):
        if message["role"] != "assistant" or (parsed := parser.parse_response(str(message["content"]))).error:
            continue
        calls: list[tuple[str, Mapping[str, object]]] = [
            ("bash_command", {"keystrokes": command.keystrokes, "duration": command.duration})
            for command in parsed.commands
        ]
        calls += [("mark_task_complete", {})] if parsed.is_task_complete else []
        fields[index] = {
            "content": f"Analysis: {parsed.analysis}\nPlan: {parsed.plan}",
            "tool_calls": [
                {
                    "id": f"call_{num_calls + number}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for number, (name, arguments) in enumerate(calls, 1)
            ],
        }
        num_calls += len(calls)
    return fields


class TrainingTerminus2(Terminus2):
    """Terminus-2 with the `TinkerLLM` of the session whose key is in `llm_kwargs`."""

    MODEL_CONNECTION = None  # Harbor does not look for an endpoint or an API key of the model.
    session: AgentSession

    @override
    def _init_llm(  # pyright: ignore[reportIncompatibleMethodOverride]  Harbor passes all arguments by name
        self, llm_kwargs: dict[str, Any] | None, **_: Any
    ) -> BaseLLM:
        assert llm_kwargs is not None
        self.session = _sessions[llm_kwargs["session"]]
        return self.session.llm

    @override
    def _get_parser(self) -> AnswerParser:
        return AnswerParser()

    @override
    def _count_total_tokens(self, chat: HarborChat) -> int:
        return self.session.llm.count_tokens(chat.messages)

    @override
    async def _run_subagent(self, *args: Any, **kwargs: Any) -> Any:
        with self.session.llm.subagent_calls():
            return await super()._run_subagent(*args, **kwargs)

    @override
    async def _handle_llm_interaction(self, *args: Any, **kwargs: Any) -> Any:
        interaction = await super()._handle_llm_interaction(*args, **kwargs)
        commands, is_task_complete, feedback, *_ = interaction
        for command in commands:
            # JSON can contain an unpaired surrogate, which cannot be encoded for the terminal.
            command.keystrokes = str(command.keystrokes).encode("utf-8", "replace").decode()
        self.session.num_commands += len(commands)
        self.session.num_parse_failures += feedback.startswith("ERROR")
        self._num_answers += 1
        self._is_confirmed = is_task_complete and self._pending_completion
        return interaction

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Run the agent on the task. Raises TrainerError if grading is impossible, and errors of Terminus-2
        that are not errors of the terminal.
        """
        self._num_answers = 0
        self._is_confirmed = False
        try:
            await super().run(instruction, environment, context)
            self.session.stop_reason = self._normal_stop_reason()
        except EpisodeEnd as end:
            if isinstance(end.cause, TrainerError):
                self.session.error = end.cause
                raise end.cause from None
            self.session.stop_reason = end.cause
        except ContextLengthExceededError:
            self.session.stop_reason = StopReason.CONTEXT_LENGTH
        except Exception as error:
            await self._attribute_error(error, environment)
        finally:
            # `TinkerLLM` records the tokens of all turns, so result.json does not need rollout details.
            context.rollout_details = None

    def _normal_stop_reason(self) -> StopReason:
        if self._is_confirmed:
            return StopReason.STOP
        # Harbor also counts the turn in which it finds the terminal closed, although that turn has no answer.
        return StopReason.SESSION_CLOSED if self._num_answers < self._n_episodes else StopReason.MAX_TURNS

    async def _attribute_error(self, error: Exception, environment: BaseEnvironment) -> None:
        """Attribute an error of the terminal to the agent if the environment still runs commands, else to the
        environment.

        An error that is attributed to the agent does not prevent grading: an agent that damaged its
        environment (`rm -rf /`, `kill -9 -1`) is graded on the state that remains. Raises SandboxError if the
        environment runs no commands, and `error` itself if it is not an error of the terminal.
        """
        if isinstance(error, TrainerError):
            self.session.error = error
            raise error
        try:
            probe = await environment.exec("true", timeout_sec=PROBE_TIMEOUT_S)
            if not environment_works(probe.return_code, environment):
                raise SandboxError(
                    " ".join((probe.stdout or probe.stderr or f"status {probe.return_code}").split())[:200]
                )
        except Exception as probe_error:
            self.session.error = SandboxError(f"the sandbox stopped responding: {probe_error}")
            raise self.session.error from error
        if not isinstance(error, RuntimeError):  # Harbor reports a closed terminal as a RuntimeError.
            raise error
        self.session.stop_reason = StopReason.SESSION_CLOSED
