"""TinkerLLM: Harbor's BaseLLM on top of a policy, with exact token ids.

The token ids of a conversation are exactly those that its sampling calls sent and returned. When Harbor
passes a history that this object produced, the next prompt consists of these ids and the ids of the new
message; sampled text is never encoded again. A history that only lost its last messages keeps the ids of the
remaining ones. A history that was rewritten, for example summarized, is rendered again. Histories of both
kinds are counted as prefix breaks, and the following turns become a new datum.

    turn 1   prompt P1                             -> completion C1      recorded
    turn 2   prompt P1 + C1 + "user: ..." + ...    -> completion C2      recorded; extends turn 1

Harbor suppresses and retries exceptions of a language model in several places. An `EpisodeEnd` is therefore
a BaseException, which reaches `TrainingTerminus2`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, override

from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.models.metric import UsageInfo

from src.core.errors import BackendError, PromptTooLong, TrainerError, boundary
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Turn
from src.envs.message_env import turn_seed
from src.policy.chat import Chat, Message
from src.policy.sampling_policy import Policy, SampleRequest


class EpisodeEnd(BaseException):
    """Ends the agent immediately. `cause` is a stop reason if the trial can be graded, else the error."""

    def __init__(self, cause: StopReason | TrainerError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingLimits:
    """The sampling parameters and the limits of one trial."""

    temperature: float
    seed: int
    lengths: LengthLimits
    max_consecutive_truncations: int  # the trial ends after this many consecutive cut or empty answers
    summarize: bool  # whether the agent summarizes its history when the context is full


class TinkerLLM(BaseLLM):
    """Samples and records all tokens of one trial. Each trial has its own object."""

    def __init__(self, *, policy: Policy, chat: Chat, limits: SamplingLimits, model_name: str) -> None:
        super().__init__()
        self.turns: list[Turn] = []  # turns of the main conversation that have a completion
        # The turns of all other calls: those of the sub-agents that summarize, and Harbor's short summary.
        self.subagent_turns: list[Turn] = []
        self.all_turns: list[Turn] = []  # the turns of both kinds that have a completion, in order
        self.prefix_breaks = 0
        self.empty_completions = 0
        self._policy = policy
        self._chat = chat
        self._limits = limits
        self._model_name = model_name
        self._messages: list[Message] = []  # of the recorded main conversation
        # number of messages n -> (prompt ids, completion ids), which together encode the first n messages of
        # the main conversation
        self._ids: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._num_calls = 0
        self._is_subagent = False
        self._consecutive_truncations = 0
        self._consecutive_overflows = 0

    @override
    async def call(self, prompt: str, **kwargs: Any) -> LLMResponse:
        """Sample the answer to `prompt` after `message_history`. An answer cut at max_tokens is returned as
        it is.

        Raises ContextLengthExceededError if the prompt is too long and the agent can shorten its context.
        Raises EpisodeEnd in three cases: the prompt is too long and the agent cannot shorten its context;
        `max_consecutive_truncations` consecutive answers of the main conversation were cut or empty; the
        backend failed.
        """
        history: Sequence[Mapping[str, Any]] | None = kwargs.get("message_history")
        is_main = history is not None and not self._is_subagent
        messages = [*_plain(history or []), {"role": "user", "content": prompt}]
        prompt_ids, num_reused = self._prompt(messages)
        max_tokens = self._limits.lengths.max_new_tokens(len(prompt_ids))
        if max_tokens == 0:
            raise self._overflow(is_main=is_main, num_tokens=len(prompt_ids))
        try:
            turn = await self._sample(prompt_ids, max_tokens=max_tokens)
        except PromptTooLong as error:
            raise self._overflow(is_main=is_main, num_tokens=len(prompt_ids)) from error
        if turn.completion_ids:
            self.all_turns.append(turn)
        content = self._chat.decode(turn.completion_ids)
        if is_main:
            self._record(turn, messages, num_reused=num_reused, content=content)
        else:
            self.subagent_turns.append(turn)
        return LLMResponse(
            content=content,
            model_name=self._model_name,
            usage=UsageInfo(
                prompt_tokens=len(turn.prompt_ids),
                completion_tokens=len(turn.completion_ids),
                cache_tokens=0,
                cost_usd=0.0,
            ),
        )

    @override
    def get_model_context_limit(self) -> int:
        """Return the smallest prompt length that is refused, `max_input_length` + 1. Terminus-2 uses it to
        decide when to summarize."""
        return self._limits.lengths.max_input_length + 1

    @override
    def get_model_output_limit(self) -> int | None:
        return self._limits.lengths.max_generate_length

    def count_tokens(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of a conversation, by the tokenizer of the model."""
        messages = _plain(history)
        if not messages:
            return 0
        if messages == self._messages:
            return sum(map(len, self._ids[len(messages)]))
        return len(self._chat.render(messages))

    @property
    def conversation(self) -> list[Mapping[str, object]]:
        """The messages of the main conversation."""
        return list(self._messages)

    @contextmanager
    def subagent_calls(self) -> Generator[None]:
        """Record the calls in the block as those of a sub-agent."""
        self._is_subagent = True
        try:
            yield
        finally:
            self._is_subagent = False

    def _prompt(self, messages: list[Message]) -> tuple[Sequence[int], int]:
        """Return the ids of a prompt, and how many of its first messages reuse recorded ids."""
        history, prompt = messages[:-1], messages[-1]
        num_reused = len(history)
        if num_reused in self._ids and history == self._messages[:num_reused]:
            return self._chat.extend(*self._ids[num_reused], [prompt]), num_reused
        return self._chat.render(messages), 0

    async def _sample(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Turn:
        self._num_calls += 1
        seed = turn_seed(self._limits.seed, self._num_calls)
        try:
            with boundary(BackendError, "sampling"):
                return await self._policy.sample(
                    SampleRequest(
                        prompt_ids=prompt_ids,
                        max_tokens=max_tokens,
                        temperature=self._limits.temperature,
                        seed=seed,
                        stop_token_ids=self._chat.stop_token_ids,
                    )
                )
        except TrainerError as error:
            # If the endpoint refuses the first prompt, `context_limit` exceeds the endpoint's context, and
            # the trial fails.
            if isinstance(error, PromptTooLong) and self._num_calls > 1:
                raise
            raise EpisodeEnd(error) from error

    def _record(self, turn: Turn, messages: list[Message], *, num_reused: int, content: str) -> None:
        if num_reused < len(self._messages):
            self.prefix_breaks += 1
        self._messages = [*messages, {"role": "assistant", "content": content}]
        self._ids = {length: ids for length, ids in self._ids.items() if length <= num_reused}
        self._ids[len(self._messages)] = (turn.prompt_ids, turn.completion_ids)
        self._consecutive_overflows = 0
        if turn.completion_ids:
            self.turns.append(turn)
        else:
            self.empty_completions += 1
        is_truncated = turn.stop_reason == StopReason.LENGTH or not turn.completion_ids
        self._consecutive_truncations = self._consecutive_truncations + 1 if is_truncated else 0
        if self._consecutive_truncations >= self._limits.max_consecutive_truncations:
            raise EpisodeEnd(StopReason.LENGTH)

    def _overflow(self, *, is_main: bool, num_tokens: int) -> BaseException:
        """Return the exception for a prompt that exceeds the length limits."""
        self._consecutive_overflows += is_main
        # A second consecutive overflow means that the summary was also too long. Harbor would then summarize
        # again and again.
        if is_main and (not self._limits.summarize or self._consecutive_overflows > 1):
            return EpisodeEnd(StopReason.CONTEXT_LENGTH)
        return ContextLengthExceededError(
            f"the context has {num_tokens} tokens; max_input_length={self._limits.lengths.max_input_length}"
        )


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]
