"""Any OpenAI-compatible endpoint: to ask (a customer, a judge), or as a policy to evaluate. The only importer of openai.

Such an endpoint takes messages and returns text: no token ids, no log-probabilities of what it read. What it says can be graded and never
trained. To play through the same trial runner all the same, its conversations are written in tokens of ours that stand for four bytes each,
about what a token is; limits and counts of tokens are estimates then. Log-probabilities are NaN, so that nothing could train on them.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any

import openai

from src.core.errors import BackendError, ConfigError, boundary
from src.core.token_ids import TokenIds
from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat, Message
from src.policy.sampling_policy import SampleRequest

NUM_RETRIES = 5  # of a call, by the client itself, where the endpoint is busy or breaks off
END = "\x03"  # of a message; control characters of these kinds are taken out of what is said
SEPARATOR = "\x02"  # between role and content
BYTES_PER_TOKEN = 4


class MessageCodec:
    """A reversible stand-in for a tokenizer: `role <STX> content <ETX>` for each message, four bytes to a token, ETX a token of its own."""

    eos_token_id: int | None = ord(END)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool,
    ) -> str:
        assert not tools and not tokenize
        written = (
            f"{message['role']}{SEPARATOR}{plain(str(message['content']))}{END}" for message in conversation
        )
        return "".join(written) + (f"assistant{SEPARATOR}" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A token's value is that of its bytes behind a leading 1, which keeps the number of them."""
        ids: list[int] = []
        for number, part in enumerate(text.split(END)):
            ids += [ord(END)] if number else []
            ids += [
                int.from_bytes(b"\x01" + bytes(chunk)) for chunk in batched(part.encode(), BYTES_PER_TOKEN)
            ]
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        return b"".join(_bytes(token) for token in token_ids).decode(errors="replace")

    def messages(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that a prompt's tokens stand for, without the answer that is to come."""
        text = self.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts = (part.partition(SEPARATOR) for part in text.split(END)[:-1])
        return [{"role": role, "content": content} for role, _, content in parts]


def plain(text: str) -> str:
    return text.replace(END, "").replace(SEPARATOR, "")


def endpoint_chat() -> Chat:
    return Chat(MessageCodec())


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """What an endpoint answered, and what that took."""

    text: str
    tool_calls: Sequence[Mapping[str, str]] = ()  # name, and arguments as the model wrote them
    was_cut: bool = False  # at max_tokens
    num_prompt_tokens: int = 0  # 0 where the endpoint does not say
    num_completion_tokens: int = 0


class ChatEndpoint:
    """One model behind an endpoint."""

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
        tools: Sequence[Mapping[str, object]] = (),
    ) -> ChatReply:
        """One answer to a conversation in OpenAI's format. BackendError when there is none."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
        }
        request |= {"seed": seed, "max_tokens": max_tokens} | ({"tools": list(tools)} if tools else {})
        with boundary(BackendError, f"asking {self.model}"):
            answer = await self._client.chat.completions.create(
                **{name: value for name, value in request.items() if value is not None}
            )
        if not answer.choices:
            raise BackendError(f"asking {self.model}: the reply holds no choice")
        [choice, *_], usage = answer.choices, answer.usage
        calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
        return ChatReply(
            text=choice.message.content or "",
            tool_calls=[{"name": function.name, "arguments": function.arguments} for function in calls],
            was_cut=choice.finish_reason == "length",
            num_prompt_tokens=usage.prompt_tokens if usage else 0,
            num_completion_tokens=usage.completion_tokens if usage else 0,
        )

    async def close(self) -> None:
        await self._client.close()


class EndpointPolicy:
    """An endpoint's model as a policy. It has no versions."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.version = 0
        self._endpoint = endpoint
        self._codec = MessageCodec()

    async def sample(self, request: SampleRequest) -> Turn:
        messages = self._codec.messages(request.prompt_ids)
        reply = await self._endpoint.reply(
            messages, max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed
        )
        completion_ids = self._codec.encode(
            plain(reply.text) + ("" if reply.was_cut else END), add_special_tokens=False
        )
        return Turn(
            prompt_ids=TokenIds.of(request.prompt_ids),
            completion_ids=completion_ids,
            logprobs=[math.nan] * len(completion_ids),
            stop_reason=StopReason.LENGTH if reply.was_cut else StopReason.STOP,
            policy_version=0,
        )


@asynccontextmanager
async def connect_endpoint(base_url: str, model: str) -> AsyncIterator[ChatEndpoint]:
    """ConfigError when the endpoint does not know the model, BackendError when it does not answer."""
    async with _client(base_url) as client:
        try:
            served = [
                model.id async for model in client.with_options(max_retries=0, timeout=10).models.list()
            ]
        except openai.NotFoundError:  # a door that not every server has
            served = []
        except openai.AuthenticationError as error:
            raise ConfigError(
                f"{base_url} does not take the key; set OPENAI_API_KEY (the environment or .env)"
            ) from error
        except openai.OpenAIError as error:
            raise BackendError(
                f"no OpenAI-compatible server answers at {base_url} ({type(error).__name__}); correct base_url"
            ) from error
        if served and model not in served and not model.startswith("tinker://"):
            raise ConfigError(
                f"model_name={model} is not served at {base_url}; it serves: {', '.join(sorted(served)[:20])}"
            )
        yield ChatEndpoint(client, model)


def open_endpoint(base_url: str, model: str) -> ChatEndpoint:
    """One that is first asked when there is something to ask."""
    return ChatEndpoint(_client(base_url), model)


def _client(base_url: str) -> openai.AsyncOpenAI:
    """The key is OPENAI_API_KEY's."""
    key = os.environ.get("OPENAI_API_KEY") or "none"  # local servers ask for none
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=NUM_RETRIES)


def _bytes(token: int) -> bytes:
    if token == ord(END):
        return END.encode()
    return token.to_bytes((token.bit_length() + 7) // 8)[1:]
