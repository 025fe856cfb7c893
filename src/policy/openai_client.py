"""OpenAI-compatible endpoints, for user simulators, judges and policies that are evaluated.

Only this module imports openai.

Such an endpoint takes messages and returns text, without token ids and logprobs. Its answers can be graded,
but the policy cannot be trained on them. A trial needs token ids, so `MessageCodec` encodes conversations as
pseudo tokens of up to four bytes each. Real tokens have a similar length, so limits and counts in pseudo
tokens are estimates of those in real tokens. The logprobs are NaN, so that nothing can train on them.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any, Protocol

import openai

from src.core.errors import BackendError, ConfigError, PromptTooLong, boundary
from src.core.process import deadline
from src.core.token_ids import TokenIds
from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat, Message
from src.policy.sampling_policy import SampleRequest

NUM_RETRIES = 5  # retries of the client per call, if the endpoint is overloaded or the connection breaks
END = "\x03"  # ends a message; END and SEPARATOR are removed from the text of messages
SEPARATOR = "\x02"  # between the role and the content
BYTES_PER_TOKEN = 4


class MessageCodec:
    """A reversible replacement for a tokenizer.

    A message is `role <STX> content <ETX>`. ETX is one token; every other token holds up to four bytes.
    """

    eos_token_id: int | None = ord(END)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: bool,
    ) -> str:
        assert not tools and not tokenize
        rendered = (
            f"{message['role']}{SEPARATOR}{_without_control(str(message['content']))}{END}"
            for message in conversation
        )
        return "".join(rendered) + (f"assistant{SEPARATOR}" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text.

        A token is a big-endian integer whose bytes are a 1 and then up to four bytes of the text. Without the
        1, zero bytes at the start of these four would be lost.
        """
        ids: list[int] = []
        for index, part in enumerate(text.split(END)):
            ids += [ord(END)] if index else []
            ids += [
                int.from_bytes(b"\x01" + bytes(chunk))
                for chunk in batched(part.encode("utf-8", "replace"), BYTES_PER_TOKEN)
            ]
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        return b"".join(_bytes(token) for token in token_ids).decode(errors="replace")

    def messages(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """Decode a prompt to its messages, without the generation prompt."""
        text = self.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts = (part.partition(SEPARATOR) for part in text.split(END)[:-1])
        return [{"role": role, "content": content} for role, _, content in parts]


def _without_control(text: str) -> str:
    """Remove END and SEPARATOR."""
    return text.replace(END, "").replace(SEPARATOR, "")


def endpoint_chat() -> Chat:
    return Chat(MessageCodec())


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """The reply of an endpoint, with its token counts."""

    text: str
    tool_calls: Sequence[Mapping[str, str]] = ()  # name and arguments, both as text
    was_cut: bool = False  # whether max_tokens or the context of the model ended the reply
    num_prompt_tokens: int = 0  # 0 if the endpoint does not report token counts
    num_completion_tokens: int = 0


class ChatModel(Protocol):
    """A model that replies to conversations. `ChatEndpoint` implements it."""

    async def reply(
        self, messages: Sequence[Message], *, temperature: float, seed: int | None
    ) -> ChatReply: ...


class ChatEndpoint:
    """One model behind an OpenAI-compatible endpoint."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self.model = model
        self._client = client

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        temperature: float,
        seed: int | None,
        max_tokens: int | None = None,
        top_p: float = 1.0,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> ChatReply:
        """Return one reply to a conversation in OpenAI's format. Raises PromptTooLong if the endpoint refuses
        the conversation for its length, and BackendError if there is no reply for another reason.

        A parameter that is None, and a `top_p` of 1, are not sent, so the endpoint uses its default.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
        }
        request |= {"seed": seed, "max_tokens": max_tokens, "top_p": None if top_p == 1 else top_p} | (
            {"tools": list(tools)} if tools else {}
        )
        action = f"sampling from {self.model}"
        try:
            with boundary(BackendError, action):
                answer = await self._client.chat.completions.create(
                    **{name: value for name, value in request.items() if value is not None}
                )
        except BackendError as error:
            if _is_too_long(error.__cause__):
                raise PromptTooLong(str(error)) from error.__cause__
            raise
        if not answer.choices:
            raise BackendError(f"{action}: the reply has no choices")
        [choice, *_], usage = answer.choices, answer.usage
        calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
        return ChatReply(
            text=choice.message.content or "",
            tool_calls=[{"name": function.name, "arguments": function.arguments} for function in calls],
            was_cut=choice.finish_reason == "length",
            num_prompt_tokens=usage.prompt_tokens if usage else 0,
            num_completion_tokens=usage.completion_tokens if usage else 0,
        )

    async def check(self, *, temperature: float, top_p: float, seed: int, max_tokens: int) -> None:
        """Request one short reply. Raises ConfigError if the endpoint refuses the request (400 or 422),
        because it then refuses the same options in every trial. Other errors are left to the trials, which
        repeat the request.
        """
        messages: list[Message] = [{"role": "user", "content": "Answer with one word: yes"}]
        try:
            await self.reply(messages, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
        except PromptTooLong:
            return
        except BackendError as error:
            cause = error.__cause__
            if isinstance(cause, openai.BadRequestError | openai.UnprocessableEntityError):
                raise ConfigError(
                    f"{self.model} refuses a request with temperature={temperature:g}, "
                    f"max_tokens={max_tokens}{'' if top_p == 1 else f', top_p={top_p:g}'} and a seed: "
                    f"{' '.join(cause.message.split())}; change the options that it names"
                ) from error

    async def close(self) -> None:
        await self._client.close()


class EndpointPolicy:
    """A policy that samples from the model of an endpoint. Its version is always 0."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.version = 0
        self._endpoint = endpoint
        self._codec = MessageCodec()

    async def sample(self, request: SampleRequest) -> Turn:
        messages = self._codec.messages(request.prompt_ids)
        reply = await self._endpoint.reply(
            messages,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
        )
        text = _without_control(reply.text) + ("" if reply.was_cut else END)
        completion_ids = self._codec.encode(text, add_special_tokens=False)
        return pseudo_turn(request, completion_ids, was_cut=reply.was_cut)


def pseudo_turn(request: SampleRequest, completion_ids: list[int], *, was_cut: bool) -> Turn:
    """Return a turn of pseudo tokens. `was_cut`: whether the answer was cut at a length limit."""
    return Turn(
        prompt_ids=TokenIds.wrap(request.prompt_ids),
        completion_ids=completion_ids,
        logprobs=[math.nan] * len(completion_ids),
        stop_reason=StopReason.LENGTH if was_cut else StopReason.STOP,
        policy_version=0,
    )


@asynccontextmanager
async def connect_endpoint(
    base_url: str, model: str, *, heartbeat_timeout_s: float
) -> AsyncGenerator[ChatEndpoint]:
    """Connect to an endpoint.

    Raises ConfigError if the endpoint rejects the API key or does not serve the model, and BackendError if it
    does not list its models within `heartbeat_timeout_s`. A tinker:// path is not checked, and no model is
    checked if the endpoint lists no models or does not have the route /models.
    """
    too_slow = (
        f"{base_url} did not answer within heartbeat_timeout_s={heartbeat_timeout_s:g}; check that the "
        "endpoint is running at this address"
    )
    async with _client(base_url) as client:
        models = client.with_options(max_retries=0, timeout=None).models
        try:
            async with deadline(heartbeat_timeout_s, BackendError, too_slow):
                served = [model.id async for model in models.list()]
        except openai.NotFoundError:  # not every server has this route
            served = []
        except openai.AuthenticationError as error:
            raise ConfigError(
                f"{base_url} rejects the API key; set OPENAI_API_KEY (the environment or .env)"
            ) from error
        except openai.PermissionDeniedError as error:
            raise ConfigError(
                f"{base_url} does not allow the API key to list the models (HTTP 403); set OPENAI_API_KEY to "
                "a key with this permission (the environment or .env)"
            ) from error
        except openai.APIStatusError as error:
            raise BackendError(
                f"{base_url} answers GET /models with HTTP {error.status_code}; check the server or correct "
                "base_url"
            ) from error
        except openai.OpenAIError as error:
            raise BackendError(
                f"no OpenAI-compatible server answers at {base_url} ({type(error).__name__}); correct "
                "base_url"
            ) from error
        if served and model not in served and not model.startswith("tinker://"):
            raise ConfigError(
                f"model_name={model} is not served at {base_url}; it serves: {', '.join(sorted(served)[:20])}"
            )
        yield ChatEndpoint(client, model)


def open_endpoint(base_url: str, model: str) -> ChatEndpoint:
    """Return an endpoint that is not contacted before the first request."""
    return ChatEndpoint(_client(base_url), model)


def _client(base_url: str) -> openai.AsyncOpenAI:
    """Create a client with the key in OPENAI_API_KEY."""
    key = os.environ.get("OPENAI_API_KEY") or "none"  # local servers need no key
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=NUM_RETRIES)


def _is_too_long(error: BaseException | None) -> bool:
    """Whether a prompt was refused for its length. vLLM has no error code for this."""
    return isinstance(error, openai.BadRequestError) and (
        error.code == "context_length_exceeded" or "maximum context length" in str(error)
    )


def _bytes(token: int) -> bytes:
    if token == ord(END):
        return END.encode()
    return token.to_bytes((token.bit_length() + 7) // 8)[1:]
