"""Who the agent talks to: a customer with a script, a model behind an OpenAI-compatible endpoint, or one that a Tinker server samples.

A customer stays the same through a run: a model that nothing trains, and seeds that depend on the task, the sample and how much has been
said. What it says is an observation to the agent, so none of its tokens is ever trained.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from src.backend import BackendSettings, connect
from src.chat import Chat, Message
from src.endpoint import ChatEndpoint
from src.envs.tool_calls import ToolCall, parse
from src.errors import BackendError, SandboxError
from src.generator import turn_seed
from src.policy import Policy

MAX_TOKENS = 512  # of one thing that a customer says
MAX_TRIES = 3  # to get a customer to say anything

Tools = Sequence[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomerTurn:
    """What a customer says, or does with tools of its own."""

    content: str = ""
    calls: Sequence[ToolCall] = ()


class Customer(Protocol):
    """One conversation's customer."""

    async def answer(self, messages: Sequence[Message], tools: Tools) -> CustomerTurn:
        """The next turn. `messages` are the conversation as the customer sees it: its instructions, the agent as the user, itself."""
        ...


class Sampled(Protocol):
    """A model that plays customers: one turn, by a seed. BackendError when it cannot be asked."""

    async def __call__(self, messages: Sequence[Message], tools: Tools, seed: int) -> CustomerTurn: ...


MakeCustomer = Callable[[int], Customer]  # of a seed, which is the task's and the sample's


class ModelCustomer:
    """A customer that a model plays. SandboxError when it has nothing to say: the agent is not to blame for that."""

    def __init__(self, sample: Sampled, seed: int) -> None:
        self._sample = sample
        self._seed = seed

    async def answer(self, messages: Sequence[Message], tools: Tools) -> CustomerTurn:
        for attempt in range(MAX_TRIES):
            turn = await self._sample(messages, tools, turn_seed(self._seed, len(messages) * MAX_TRIES + attempt))
            if turn.content.strip() or turn.calls:
                return turn
        raise SandboxError(f"the customer said nothing, {MAX_TRIES} times over")


class ScriptedCustomer:
    """Tells its whole story at once, agrees to whatever it is asked, and leaves with `farewell` after so many answers."""

    def __init__(self, story: str, *, farewell: str, num_answers: int = 6) -> None:
        self._story = story
        self._farewell = farewell
        self._num_answers = num_answers

    async def answer(self, messages: Sequence[Message], tools: Tools) -> CustomerTurn:
        num_said = sum(message["role"] == "assistant" for message in messages)
        if num_said > self._num_answers:
            return CustomerTurn(content=self._farewell)
        return CustomerTurn(content="Yes, please go ahead." if num_said else self._story)


class EndpointModel:
    """Customers behind an endpoint, our own server's chat route for one."""

    def __init__(self, endpoint: ChatEndpoint, *, temperature: float) -> None:
        self._endpoint = endpoint
        self._temperature = temperature

    async def __call__(self, messages: Sequence[Message], tools: Tools, seed: int) -> CustomerTurn:
        reply = await self._endpoint.reply(
            [with_arguments_as_text(message) for message in messages],
            temperature=self._temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            tools=tools,
        )
        calls = [ToolCall(name=call["name"], arguments=arguments_of(call["arguments"])) for call in reply.tool_calls]
        return CustomerTurn(content=reply.text, calls=calls)

    async def close(self) -> None:
        await self._endpoint.close()


class TinkerModel:
    """Customers that a frozen sampling client plays: a base model or a checkpoint. It connects when first asked, and anew after a loss."""

    def __init__(self, settings: BackendSettings, sampler_path: str | None, chat: Chat, *, temperature: float) -> None:
        self._settings = settings
        self._sampler_path = sampler_path
        self._chat = chat
        self._temperature = temperature
        self._connecting = asyncio.Lock()
        self._connection = AsyncExitStack()
        self._policy: Policy | None = None

    async def __call__(self, messages: Sequence[Message], tools: Tools, seed: int) -> CustomerTurn:
        prompt_ids = self._chat.render(messages, tools=tools)
        policy = await self._connected()
        try:
            turn = await policy.sample(
                prompt_ids, max_tokens=MAX_TOKENS, temperature=self._temperature, seed=seed, stop=self._chat.stop_token_ids
            )
        except BackendError:
            await self._disconnect(policy)
            raise
        parsed = parse(self._chat.decode(turn.completion_ids), names_of(tools))
        return CustomerTurn(content=parsed.content, calls=list(parsed.calls) if tools else [])

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


def names_of(tools: Tools) -> set[str]:
    return {str(function["name"]) for tool in tools if isinstance(function := tool["function"], Mapping)}


def arguments_of(text: str) -> dict[str, object]:
    """A model's arguments, which may be anything; what is no object is none at all."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def with_arguments_as_text(message: Message) -> Message:
    """OpenAI's format has a call's arguments as a JSON text, chat templates have them as an object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [{**call, "function": _in_text(call["function"])} for call in calls]}


def _in_text(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
