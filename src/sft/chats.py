"""Chats in JSON lines files.

    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}], "tools": []}

The format is that of Hugging Face chat datasets and of OpenAI's fine-tuning files: `tools`, which may be
missing, are OpenAI schemas, and a message may have `tool_calls`. Other keys of a line are ignored. Every
mistake raises a ConfigError that names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from src.core.errors import ConfigError
from src.policy.tool_messages import Message


def _object(arguments: object) -> object:
    """Return the arguments of a call as an object. In OpenAI's format they are JSON text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from error


def _text(content: object) -> object:
    """Return the content as one text: "" for None, and the joined parts for a list of text parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(content) else content
    return "" if content is None else content


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object)]


class Call(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[Call] | None = None
    trainable: bool = False  # read by train_on=customized


class ChatLine(BaseModel):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One conversation."""

    where: str  # file and line, for error messages
    messages: list[Message]
    tools: list[dict[str, Any]]
    trainable: list[bool]  # one per message


LINE = TypeAdapter(ChatLine)


def read_chats(path: Path) -> list[Chat]:
    """Return the chats of a file, in its order. Raises ConfigError if it has none or a line is not valid."""
    chats = list(_read(path))
    if not chats:
        raise ConfigError(f"{path}, line 1: the file has no chat; give a file with one chat per line")
    return chats


def chat_of(line: ChatLine, where: str) -> Chat:
    """Return the chat of a checked line."""
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
                yield chat_of(LINE.validate_json(content), where)
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                field = ".".join(str(part) for part in first["loc"])[:100]
                reason = first["msg"].removeprefix("Value error, ")
                raise ConfigError(f"{where}: {f'{field}: ' if field else ''}{reason}; correct it") from error
