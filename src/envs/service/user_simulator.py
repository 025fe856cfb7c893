"""Who the agent serves: a customer with a script, or one that a model plays, behind an OpenAI-compatible endpoint or sampled by Tinker.

A customer is fixed through a run: nothing trains the model, and its seeds depend on the task, the sample and how much has been said. Its
words are observations and train nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from src.core.errors import BackendError, SandboxError
from src.envs.message_env import turn_seed
from src.policy.backend import BackendSettings, connect
from src.policy.chat import Chat, Message
from src.policy.openai_client import ChatEndpoint
from src.policy.sampling_policy import Policy, SampleRequest

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
ENDINGS = (STOP, TRANSFER, OUT_OF_SCOPE)  # any of them in what a customer says ends the conversation
MAX_TOKENS = 512  # of what a model says at once
MAX_TRIES = 3  # to make a model say anything
GREETING: Sequence[Message] = (
    {"role": "assistant", "content": "Hi! How can I help you today?"},
)  # to a customer who is to begin

Tools = Sequence[Mapping[str, object]]  # OpenAI schemas


class Customer(Protocol):
    """One customer in one conversation."""

    async def reply(self, conversation: Sequence[Message]) -> str:
        """What the customer says next. The conversation is the agent's view without calls and their results: the agent's words are
        `assistant`, the customer's own are `user`; it is empty where the customer begins.

        A customer with tools of its own calls them as agents do, in the text; calls and results are then in the conversation."""
        ...


def ends(text: str) -> bool:
    return any(ending in text for ending in ENDINGS)


class ScriptedCustomer:
    """Says its lines one after the other, whatever it hears, and then goodbye."""

    def __init__(self, lines: Sequence[str], *, goodbye: str = "Thanks.") -> None:
        self._lines = lines
        self._goodbye = goodbye

    async def reply(self, conversation: Sequence[Message]) -> str:
        said = sum(message["role"] == "user" for message in conversation)
        return self._lines[said] if said < len(self._lines) else f"{self._goodbye} {STOP}"


class Model(Protocol):
    """What plays customers. Frozen: the same seed says the same."""

    async def say(self, messages: Sequence[Message], *, tools: Tools, seed: int) -> str:
        """The next message of the assistant, which the customer is to its own model. BackendError when it cannot be asked."""
        ...

    async def close(self) -> None: ...


class ModelCustomer:
    """A customer that a model plays by written instructions."""

    def __init__(self, model: Model, instructions: str, *, seed: int, tools: Tools = ()) -> None:
        self._model = model
        self._instructions: Message = {"role": "system", "content": instructions}
        self._seed = seed
        self._tools = tools

    async def reply(self, conversation: Sequence[Message]) -> str:
        """SandboxError when it has nothing to say: that is not the agent's fault."""
        messages = [
            self._instructions,
            *(seen_from_the_other_side(message) for message in conversation or GREETING),
        ]
        for attempt in range(MAX_TRIES):
            said = await self._model.say(
                messages, tools=self._tools, seed=turn_seed(self._seed, len(messages) * MAX_TRIES + attempt)
            )
            if said.strip():
                return said
        raise SandboxError(f"the customer said nothing, {MAX_TRIES} times over")


class EndpointModel:
    """A model behind an endpoint, our own server's chat route for one."""

    def __init__(self, endpoint: ChatEndpoint, *, temperature: float) -> None:
        self._endpoint = endpoint
        self._temperature = temperature

    async def say(self, messages: Sequence[Message], *, tools: Tools, seed: int) -> str:
        reply = await self._endpoint.reply(
            [with_arguments_as_text(message) for message in messages],
            temperature=self._temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            tools=tools,
        )
        calls = (
            f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}</tool_call>'
            for call in reply.tool_calls
        )
        return reply.text + "".join(calls)

    async def close(self) -> None:
        await self._endpoint.close()


class TinkerModel:
    """A frozen sampling client: a base model or a checkpoint. It connects when it is first asked, and anew after a loss."""

    def __init__(
        self, settings: BackendSettings, sampler_path: str | None, chat: Chat, *, temperature: float
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
        prompt_ids = chat.render(messages, tools=tools)
        try:
            turn = await policy.sample(
                SampleRequest(
                    prompt_ids=prompt_ids,
                    max_tokens=MAX_TOKENS,
                    temperature=self._temperature,
                    seed=seed,
                    stop_token_ids=chat.stop_token_ids,
                )
            )
        except BackendError:
            await self._disconnect(policy)
            raise
        return chat.decode(turn.completion_ids)

    async def close(self) -> None:
        await self._connection.aclose()

    async def _connected(self) -> Policy:
        async with self._connecting:
            if self._policy is None:
                endpoint = await self._connection.enter_async_context(connect(self._settings))
                self._policy = await endpoint.open_policy(self._sampler_path)
            return self._policy

    async def _disconnect(self, policy: Policy) -> None:
        async with self._connecting:
            if self._policy is policy:
                self._policy = None
                await self._connection.aclose()


def seen_from_the_other_side(message: Message) -> Message:
    """To the model that plays the customer, the agent is the user."""
    other = {"assistant": "user", "user": "assistant"}
    return {**message, "role": other.get(str(message["role"]), message["role"])}


def with_arguments_as_text(message: Message) -> Message:
    """OpenAI's format has a call's arguments as a JSON text, chat templates have them as an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [{**call, "function": _in_text(call["function"])} for call in calls]}


def _in_text(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
