"""Terminus-2 for training: our language model inside, and every way an episode can end leaves a reason and goes on to the verifier.

Harbor builds agents itself, from JSON. The live language model therefore waits in a registry, under a key that the agent is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from harbor.agents.terminus_2 import terminus_2
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, ContextLengthExceededError
from harbor.llms.chat import Chat as HarborChat
from harbor.models.agent.context import AgentContext

from src.core.errors import SandboxError, TrainerError
from src.core.trajectory import StopReason
from src.envs.harbor.tinker_llm import EpisodeOver, TinkerLLM
from src.envs.sandbox.environment import is_infrastructure_failure

PROBE_TIMEOUT_S = 20


@dataclass(kw_only=True)
class Session:
    """What a trial and the objects Harbor builds for it share."""

    llm: TinkerLLM
    stop_reason: StopReason | None = None  # None: the agent did not come to an end of its own
    error: TrainerError | None = None  # what ended the agent without a gradable result
    num_commands: int = 0  # Terminus-2's tool calls
    num_parse_failures: int = 0  # answers that were no such calls


_sessions: dict[str, Session] = {}


@contextmanager
def registered(key: str, session: Session) -> Iterator[None]:
    """Make `session` known under `key` while a trial runs."""
    assert key not in _sessions, f"two trials share the key {key}"
    _sessions[key] = session
    try:
        yield
    finally:
        del _sessions[key]


def opening_prompt(instruction: str) -> str:
    """What Terminus-2 says first, without the screen: no trial's first prompt is shorter."""
    template = Path(terminus_2.__file__).parent / "templates" / "terminus-json-plain.txt"
    return template.read_text(encoding="utf-8").format(instruction=instruction, terminal_state="")


class TrainingTerminus2(Terminus2):
    """Terminus-2 over the `TinkerLLM` of the session named in `llm_kwargs`."""

    session: Session

    @override
    def _init_llm(self, llm_kwargs: dict[str, Any] | None, **_: Any) -> BaseLLM:
        assert llm_kwargs is not None
        self.session = _sessions[llm_kwargs["session"]]
        return self.session.llm

    @override
    def _count_total_tokens(self, chat: HarborChat) -> int:
        return self.session.llm.count_tokens(chat.messages)

    @override
    async def _run_subagent(self, *args: Any, **kwargs: Any) -> Any:
        with self.session.llm.recording_apart():
            return await super()._run_subagent(*args, **kwargs)

    @override
    async def _handle_llm_interaction(self, *args: Any, **kwargs: Any) -> Any:
        interaction = await super()._handle_llm_interaction(*args, **kwargs)
        commands, is_task_complete, feedback, *_ = interaction
        for (
            command
        ) in commands:  # half of a surrogate pair, which JSON can name, is nothing that can be typed
            command.keystrokes = str(command.keystrokes).encode("utf-8", "replace").decode()
        self.session.num_commands += len(commands)
        self.session.num_parse_failures += feedback.startswith("ERROR")
        self._answers += 1
        self._is_confirmed = is_task_complete and self._pending_completion
        return interaction

    @override
    def _limit_output_length(self, output: str, max_bytes: int = 10000) -> str:
        """As Harbor does it, which encodes all of the output four times; an agent can make 16 MiB of it in every turn."""
        if len(output) <= 2 * max_bytes:
            return super()._limit_output_length(output, max_bytes)
        first, last = (
            part.encode()[where].decode(errors="ignore")
            for part, where in (
                (output[:max_bytes], slice(max_bytes // 2)),
                (output[-max_bytes:], slice(-(max_bytes // 2), None)),
            )
        )
        omitted = len(output.encode()) - len(first.encode()) - len(last.encode())
        return f"{first}\n[... output limited to {max_bytes} bytes; {omitted} interior bytes omitted ...]\n{last}"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Play the episode. Raises only what makes it impossible to grade: a failing backend or a dead sandbox."""
        self._answers = 0
        self._is_confirmed = False
        try:
            await super().run(instruction, environment, context)
            self.session.stop_reason = self._how_it_ended()
        except EpisodeOver as over:
            if isinstance(over.cause, TrainerError):
                self.session.error = over.cause
                raise over.cause from None
            self.session.stop_reason = over.cause
        except ContextLengthExceededError:
            self.session.stop_reason = StopReason.CONTEXT_LENGTH
        except Exception as error:
            await self._blame(error, environment)
        finally:
            # The session has every token once; Harbor would write them into result.json, one per line, for each turn again.
            context.rollout_details = None

    def _how_it_ended(self) -> StopReason:
        if self._is_confirmed:
            return StopReason.STOP
        # Harbor counts the episode in which it finds the terminal gone, but nothing was answered in it.
        return StopReason.SESSION_CLOSED if self._answers < self._n_episodes else StopReason.MAX_TURNS

    async def _blame(self, error: Exception, environment: BaseEnvironment) -> None:
        """A terminal that stops working is the agent's doing while its sandbox still runs commands, and the sandbox's failure otherwise.

        An agent that broke its own machine (`rm -rf /`, `kill -9 -1`) is graded on what is left; trying again would only hide it.
        """
        if isinstance(error, TrainerError):
            self.session.error = error
            raise error
        try:
            probe = await environment.exec("true", timeout_sec=PROBE_TIMEOUT_S)
            if not is_infrastructure_failure(probe.return_code, environment):
                raise SandboxError(
                    " ".join((probe.stdout or probe.stderr or f"status {probe.return_code}").split())[:200]
                )
        except Exception as dead:
            self.session.error = SandboxError(f"the sandbox stopped answering: {dead}")
            raise self.session.error from error
        if not isinstance(
            error, RuntimeError
        ):  # Harbor reports a dead terminal as a RuntimeError; anything else is a fault
            raise error
        self.session.stop_reason = StopReason.SESSION_CLOSED
