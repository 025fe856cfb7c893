"""TinkerLLM: Harbor's BaseLLM over one version of our policy, token in and token out.

A conversation's ids are fixed at the sampling call. When Harbor hands back a history that this object produced, the next prompt is those
ids plus the new message; nothing sampled is ever encoded again. A history that was rewritten (summarised, say) is rendered afresh, counted
as a prefix break, and starts a new datum later on.

    turn 1   prompt P1                             -> completion C1      recorded
    turn 2   prompt P1 + C1 + "user: ..." + ...    -> completion C2      recorded; extends turn 1

Harbor swallows and retries exceptions of a language model in several places. What must end the episode is therefore an `EpisodeOver`, which
is no Exception and passes through to our agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, override

from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.models.metric import UsageInfo

from src.core.errors import BackendError, TrainerError, boundary
from src.core.length_limits import LengthLimits
from src.core.trajectory import StopReason, Turn
from src.envs.message_env import turn_seed
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy, SampleRequest


class EpisodeOver(BaseException):
    """The agent must stop now: for a reason that leaves its work gradable, or because of an error that does not."""

    def __init__(self, cause: StopReason | TrainerError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingLimits:
    """How one trial samples."""

    temperature: float
    seed: int
    lengths: LengthLimits
    max_consecutive_truncations: int  # cut or empty answers in a row
    summarize: bool  # whether the agent has an answer to a full context


class TinkerLLM(BaseLLM):
    """The only source of a trial's tokens. One object per trial."""

    def __init__(self, *, policy: Policy, chat: Chat, limits: SamplingLimits, model_name: str) -> None:
        super().__init__()
        self.turns: list[Turn] = []  # of the main conversation
        self.subagent_turns: list[Turn] = []  # summaries and the like
        self.all_turns: list[Turn] = []  # both, as they were sampled
        self.prefix_breaks = 0
        self.empty_completions = 0
        self._policy = policy
        self._chat = chat
        self._limits = limits
        self._model_name = model_name
        self._messages: list[tuple[str, str]] = []  # the main conversation as we know it
        self._ids: dict[
            int, tuple[Sequence[int], Sequence[int]]
        ] = {}  # by number of messages: the prompt and completion of them
        self._calls = 0
        self._is_subagent = False
        self._useless_in_a_row = 0
        self._overflows_in_a_row = 0

    @override
    async def call(self, prompt: str, **kwargs: Any) -> LLMResponse:
        """Sample the answer to `prompt` after `message_history`.

        An answer cut at max_tokens is an answer. Raises ContextLengthExceededError where the agent can do something about it, EpisodeOver
        where it cannot: too many useless answers in a row, a full context, a failing backend.
        """
        history: Sequence[Mapping[str, Any]] | None = kwargs.get("message_history")
        is_main = history is not None and not self._is_subagent
        messages = [*_pairs(history or []), ("user", prompt)]
        prompt_ids, known = self._prompt(messages)
        room = self._limits.lengths.room(len(prompt_ids))
        if room == 0:
            raise self._overflow(is_main=is_main, tokens=len(prompt_ids))
        turn = await self._sample(prompt_ids, max_tokens=room)
        if turn.completion_ids:
            self.all_turns.append(turn)
        content = self._chat.decode(turn.completion_ids)
        if is_main:
            self._record(turn, messages, known=known, content=content)
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
        """The first length that is not answered, from which Terminus-2 counts back to where it summarises."""
        return self._limits.lengths.max_input_length + 1

    @override
    def get_model_output_limit(self) -> int | None:
        return self._limits.lengths.max_generate_length

    def count_tokens(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a conversation so far, counted by the model's own tokenizer."""
        messages = _pairs(history)
        if not messages:
            return 0
        if messages == self._messages:
            return sum(map(len, self._ids[len(messages)]))
        return len(self._chat.render(_dicts(messages)))

    @property
    def conversation(self) -> list[Mapping[str, object]]:
        """The main conversation so far, as messages."""
        return list(_dicts(self._messages))

    @contextmanager
    def recording_apart(self) -> Iterator[None]:
        """Calls made inside belong to a sub-agent, not to the conversation that is trained."""
        self._is_subagent = True
        try:
            yield
        finally:
            self._is_subagent = False

    def _prompt(self, messages: list[tuple[str, str]]) -> tuple[Sequence[int], int]:
        """The ids of a prompt, and how many messages of the recorded conversation it continues word for word."""
        history, question = messages[:-1], messages[-1]
        known = len(history)
        if known in self._ids and history == self._messages[:known]:
            return self._chat.extend(*self._ids[known], _dicts([question])), known
        return self._chat.render(_dicts(messages)), 0

    async def _sample(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Turn:
        self._calls += 1
        seed = turn_seed(self._limits.seed, self._calls)
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
            raise EpisodeOver(error) from error

    def _record(self, turn: Turn, messages: list[tuple[str, str]], *, known: int, content: str) -> None:
        if known < len(self._messages):
            self.prefix_breaks += 1
        self._messages = [*messages, ("assistant", content)]
        self._ids = {length: ids for length, ids in self._ids.items() if length <= known}
        self._ids[len(self._messages)] = (turn.prompt_ids, turn.completion_ids)
        self._overflows_in_a_row = 0
        if turn.completion_ids:
            self.turns.append(turn)
        else:
            self.empty_completions += 1
        useless = turn.stop_reason == StopReason.LENGTH or not turn.completion_ids
        self._useless_in_a_row = self._useless_in_a_row + 1 if useless else 0
        if self._useless_in_a_row >= self._limits.max_consecutive_truncations:
            raise EpisodeOver(StopReason.LENGTH)

    def _overflow(self, *, is_main: bool, tokens: int) -> BaseException:
        """What to raise for a prompt that does not fit."""
        self._overflows_in_a_row += is_main
        # The second overflow in a row means that summarising did not help; Harbor would go on for ever.
        if is_main and (not self._limits.summarize or self._overflows_in_a_row > 1):
            return EpisodeOver(StopReason.CONTEXT_LENGTH)
        return ContextLengthExceededError(
            f"{tokens} tokens are over the limit of {self._limits.lengths.max_input_length}"
        )


def _pairs(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _dicts(messages: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
    return [{"role": role, "content": content} for role, content in messages]
