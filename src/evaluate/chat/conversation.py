"""A conversation of a user with a policy, and the loop that reads messages and writes answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from src.core.errors import ConfigError
from src.core.printable import printable
from src.core.trajectory import StopReason, Turn
from src.evaluate.chat.config import ChatConfig
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy, SampleRequest
from src.policy.tool_messages import Message

COMMANDS = {"/reset": "starts a new conversation", "/exit": "ends the chat, as Ctrl-D does"}
MAX_SEED = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    text: str
    is_cut: bool  # whether the answer was cut at max_tokens or at context_limit


class Conversation:
    """A conversation with a policy. It keeps the exact token ids of the last prompt and answer."""

    def __init__(self, policy: Policy, chat: Chat, config: ChatConfig) -> None:
        self._policy = policy
        self._chat = chat
        self._config = config
        self._last: Turn | None = None
        self._num_answers = 0

    def reset(self) -> None:
        self._last = None

    async def answer(self, text: str) -> Answer:
        """Return the policy's answer to the user's message `text`.

        Raises ConfigError if the message does not fit into the context, and BackendError if the server fails.
        An error leaves the conversation unchanged.
        """
        config = self._config
        message: Message = {"role": "user", "content": text}
        if self._last is None:
            system: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
            prompt_ids: Sequence[int] = self._chat.render([*system, message])
        else:
            prompt_ids = self._chat.extend(self._last.prompt_ids, self._last.completion_ids, [message])
        max_tokens = config.length_limits.max_new_tokens(len(prompt_ids))
        if max_tokens == 0:
            raise ConfigError(
                f"the conversation has {len(prompt_ids)} tokens, more than "
                f"max_input_length={config.length_limits.max_input_length}; type /reset, or a shorter message"
            )
        turn = await self._policy.sample(
            SampleRequest(
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                seed=(config.seed + self._num_answers) % MAX_SEED,
                stop_token_ids=self._chat.stop_token_ids,
            )
        )
        self._last = turn
        self._num_answers += 1
        return Answer(
            text=self._chat.decode(turn.completion_ids), is_cut=turn.stop_reason == StopReason.LENGTH
        )


def talk(
    answer: Callable[[str], Answer],
    reset: Callable[[], None],
    *,
    read: Callable[[], str],
    write: Callable[[str], None],
) -> None:
    """Answer the lines that `read` returns, and call `reset` for the line /reset. Return when `read` raises
    EOFError or returns /exit.

    A ConfigError of `answer` is shown with `write`, and the next line is read. A BackendError is raised.
    """
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            write("error: the line is not UTF-8 text; type it again")
            continue
        if line == "/exit":
            return
        if line == "/reset":
            reset()
            write("a new conversation starts")
        elif re.fullmatch(r"/\w*", line.partition(" ")[0]):
            write(f"error: unknown command {line.partition(' ')[0]}; commands are {' and '.join(COMMANDS)}")
        elif line:
            try:
                reply = answer(line)
            except ConfigError as error:
                write(f"error: {error}")
                continue
            write(printable(reply.text) + (" [cut at the token limit]" if reply.is_cut else ""))
