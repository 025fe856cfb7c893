"""Chats in JSON lines files.

    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}], "tools": []}

The format is that of Hugging Face chat datasets and of OpenAI's fine-tuning files. `tools` contains OpenAI
schemas and may be missing. A message may have `tool_calls`. With `train_on=customized`, the assistant
messages with `"trainable": true` are trained. OpenAI's `"weight": 0` would have no effect, so it is
refused in a message without `trainable`. Other keys of a line are ignored, and other keys of a message are
passed to the chat template. The first invalid line causes a ConfigError that names the file and the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from src.core.errors import ConfigError
from src.policy.tool_messages import Message


def _parsed_arguments(arguments: object) -> object:
    """Parse the arguments of a call if they are JSON text, as in OpenAI's format. Other values are returned
    unchanged, and pydantic rejects them unless they are an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return from_json(arguments)  # json.loads would raise RecursionError for deep nesting
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _joined_text(content: object) -> object:
    """Return "" for None and the joined texts for a list of text parts. Other values are returned unchanged,
    and pydantic rejects them unless they are text."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(content) else content
    return "" if content is None else content


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed_arguments)]


class Call(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined_text)] = ""
    tool_calls: list[Call] | None = None
    trainable: bool = False  # whether train_on=customized trains this message

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, message: object) -> object:
        is_call = isinstance(message, Mapping) and bool(message.get("tool_calls"))
        if isinstance(message, Mapping) and message.get("content") is None and not is_call:
            raise ValueError("content is missing or null; only a message with tool_calls may have no content")
        if isinstance(message, Mapping) and message.get("weight") == 0 and "trainable" not in message:
            raise ValueError('weight=0 has no effect; set "trainable" instead, and use train_on=customized')
        return message


def _with_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a tool that is not an OpenAI schema. Return any other tool unchanged, so that the
    template renders its keys in their order."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('not an OpenAI schema: {"type": "function", "function": {"name": ..., ...}}')
    return tool


class ChatLine(BaseModel):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Annotated[dict[str, Any], AfterValidator(_with_function)]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One validated conversation."""

    where: str  # file and line, for error messages
    messages: list[Message]
    tools: list[dict[str, Any]]
    trainable: list[bool]  # one per message


LINE_ADAPTER = TypeAdapter(ChatLine)


def read_chats(path: Path) -> list[Chat]:
    """Return the chats of a file in their order.

    Raises ConfigError if the file cannot be read, contains no chat or has an invalid line.
    """
    chats = list(_read(path))
    if not chats:
        raise ConfigError(f"{path}, line 1: the file has no chat; give a file with one chat per line")
    return chats


def chat_of(line: ChatLine, where: str) -> Chat:
    """Return the chat of a validated line. `where` names the file and the line in error messages."""
    return Chat(
        where=where,
        messages=[
            message.model_dump(exclude={"trainable"}, exclude_none=True, mode="python")
            for message in line.messages
        ],
        tools=line.tools or [],
        trainable=[message.trainable for message in line.messages],
    )


def _read(path: Path) -> Iterator[Chat]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; correct data= or eval_data=") from error
    with file:
        for number, content in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not content.strip():
                continue
            try:
                yield chat_of(LINE_ADAPTER.validate_json(content), where)
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                field = ".".join(str(part) for part in first["loc"])[:100]
                reason = first["msg"].removeprefix("Value error, ")
                raise ConfigError(
                    f"{where}: {f'{field}: ' if field else ''}{reason}; correct the line"
                ) from error
