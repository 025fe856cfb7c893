"""Tools and tool calls in the forms that chat templates and endpoints take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, object]  # {"role": ..., "content": ...}, the form that chat templates take
Tools = Sequence[Mapping[str, object]]  # OpenAI schemas

TOOLS_INTRODUCTION = (
    'You can call a function by answering with {"name": ..., "arguments": {...}} and nothing else. '
    "The functions:"
)


def with_described_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """Return the messages with a description of the tools at the end of the system message.

    If the first message is not a system message, the description becomes a new first message.
    """
    description = TOOLS_INTRODUCTION + "".join(f"\n- {describe_tool(tool)}" for tool in tools)
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]


def describe_tool(tool: Mapping[str, object]) -> str:
    """Return the signature and the description of a tool.

    >>> parameters = {"properties": {"n": {"type": "integer"}}}
    >>> describe_tool({"function": {"name": "f", "description": "Does something.", "parameters": parameters}})
    'f(n: integer): Does something.'
    """
    function: Any = tool["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    arguments = ", ".join(
        f"{name}: {schema.get('type', 'any') if isinstance(schema, Mapping) else 'any'}"
        for name, schema in properties.items()
    )
    return f"{function['name']}({arguments}): {function.get('description') or ''}"


def with_json_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON text.

    OpenAI's format and the templates of DeepSeek require JSON text. Other templates take objects.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [{**call, "function": _as_json(call["function"])} for call in calls]}


def _as_json(function: Mapping[str, object]) -> Mapping[str, object]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
