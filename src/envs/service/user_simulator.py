"""User simulators, with which service agents talk.

A user simulator follows a script or uses a language model behind an OpenAI-compatible or a Tinker endpoint.
The model is not trained. Its seeds depend only on the seed of the run, the task, the index of the trial in
its group, the length of the conversation and, after an empty reply, the number of the try. A user simulator
therefore behaves in the same way throughout a run. The messages of a user simulator are observations of the
agent and contribute no training tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from src.core.errors import BackendError, SandboxError
from src.envs.message_env import turn_seed
from src.envs.service.tool_calls import without_thoughts
from src.policy.backend import BackendOptions, connect
from src.policy.chat import Chat, Message
from src.policy.openai_client import ChatEndpoint
from src.policy.sampling_policy import Policy, SampleRequest
from src.policy.tool_messages import Tools, with_json_arguments

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
END_MARKERS = (STOP, TRANSFER, OUT_OF_SCOPE)  # each ends the conversation if the user sends it
MAX_TOKENS = 512  # per message of a model
MAX_TRIES = 3  # maximum number of requests to get a message that is not empty
# The conversation that a model reads before it sends the first message.
GREETING: Sequence[Message] = ({"role": "assistant", "content": "Hi! How can I help you today?"},)


class UserSimulator(Protocol):
    """The user in one conversation."""

    async def reply(self, conversation: Sequence[Message]) -> str:
        """Return the user's next message.

        `conversation` has the agent's messages with the role `assistant` and the user's messages with the
        role `user`, without the agent's tool calls and their results. `conversation` is empty if the user
        speaks first. A user with tools writes its calls into the message, as an agent does. `conversation`
        contains the user's calls and their results.
        """
        ...


def ends(text: str) -> bool:
    """Return whether a message of the user ends the conversation."""
    return any(marker in text for marker in END_MARKERS)


class ScriptedUserSimulator:
    """A user that sends fixed lines in order, independently of the agent, and then ends the conversation."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    async def reply(self, conversation: Sequence[Message]) -> str:
        num_sent = sum(message["role"] == "user" for message in conversation)
        return self._lines[num_sent] if num_sent < len(self._lines) else f"Thanks. {STOP}"


class UserModel(Protocol):
    """A language model with fixed weights that simulates users.

    The same request and seed give the same message.
    """

    async def say(self, messages: Sequence[Message], *, tools: Tools, seed: int) -> str:
        """Return the next `assistant` message. Raises BackendError if the model gives no answer."""
        ...

    async def close(self) -> None: ...


class ModelUserSimulator:
    """A user that a language model simulates according to `instructions`."""

    def __init__(self, model: UserModel, instructions: str, *, seed: int, tools: Tools = ()) -> None:
        self._model = model
        self._instructions: Message = {"role": "system", "content": instructions}
        self._seed = seed
        self._tools = tools

    async def reply(self, conversation: Sequence[Message]) -> str:
        """Return the model's next message, without thoughts. Raises SandboxError if every reply of the model
        is empty. This is an infrastructure failure, which the agent cannot cause.
        """
        messages = [
            self._instructions,
            *(with_roles_swapped(message) for message in conversation or GREETING),
        ]
        for number in range(MAX_TRIES):
            seed = turn_seed(self._seed, len(messages) * MAX_TRIES + number)
            text = await self._model.say(messages, tools=self._tools, seed=seed)
            if "<think>" in text or "</think>" in text:
                text = without_thoughts(text)
            if text.strip():
                return text
        raise SandboxError(f"the user simulator's model gave an empty reply {MAX_TRIES} times")


class EndpointUserModel:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, endpoint: ChatEndpoint, *, temperature: float) -> None:
        self._endpoint = endpoint
        self._temperature = temperature

    async def say(self, messages: Sequence[Message], *, tools: Tools, seed: int) -> str:
        reply = await self._endpoint.reply(
            [with_json_arguments(message) for message in messages],
            temperature=self._temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            tools=tools,
        )
        calls = (
            f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'
            for name, arguments in ((call["name"], call["arguments"] or "{}") for call in reply.tool_calls)
        )
        return reply.text + "".join(calls)

    async def close(self) -> None:
        await self._endpoint.close()


class TinkerUserModel:
    """A base model or a checkpoint behind a Tinker endpoint.

    It connects at the first request. After a failed request, it connects again at the next request.
    `sampler_path` is the path of the checkpoint; None: the base model.
    """

    def __init__(
        self, settings: BackendOptions, sampler_path: str | None, chat: Chat, *, temperature: float
    ) -> None:
        self._settings = settings
        self._sampler_path = sampler_path
        self._chat = chat
        self._temperature = temperature
        self._connecting = asyncio.Lock()
        self._connection = AsyncExitStack()
        self._policy: Policy | None = None

    async def say(self, messages: Sequence[Message], *, tools: Tools, seed: int) -> str:
        chat, policy = self._chat, await self._connected()
        request = SampleRequest(
            prompt_ids=chat.render(messages, tools=tools),
            max_tokens=MAX_TOKENS,
            temperature=self._temperature,
            seed=seed,
            stop_token_ids=chat.stop_token_ids,
        )
        try:
            turn = await policy.sample(request)
        except BackendError:
            await self._disconnect(policy)
            raise
        return chat.decode(turn.completion_ids)

    async def close(self) -> None:
        await self._connection.aclose()

    async def _connected(self) -> Policy:
        async with self._connecting:
            if self._policy is None:
                async with AsyncExitStack() as stack:
                    endpoint = await stack.enter_async_context(connect(self._settings))
                    self._policy = await endpoint.open_policy(self._sampler_path)
                    self._connection = stack.pop_all()
            return self._policy

    async def _disconnect(self, policy: Policy) -> None:
        async with self._connecting:
            if self._policy is policy:
                self._policy = None
                await self._connection.aclose()


def with_roles_swapped(message: Message) -> Message:
    """Swap the roles of user and agent, because the model of the user simulator is the `assistant`."""
    swapped = {"assistant": "user", "user": "assistant"}
    return {**message, "role": swapped.get(str(message["role"]), message["role"])}
