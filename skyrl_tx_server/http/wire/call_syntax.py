"""Parse the tool calls in a sampled text, in the syntax of the model's chat template.

Qwen and Hermes write JSON between tags, Qwen3-Coder writes further tags between these tags, and Llama 3
answers with JSON only:

    <tool_call>{"name": "ls", "arguments": {"path": "/"}}</tool_call>
    <tool_call><function=ls><parameter=path>/</parameter></function></tool_call>
    {"name": "ls", "parameters": {"path": "/"}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""A token that Llama 3 may write before a call."""

_FUNCTION_OPEN, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER_OPEN, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
# Models write these values as in Python, not as in JSON.
_PYTHON_VALUES: Mapping[str, object] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call. An unpaired surrogate in the model's JSON becomes a question mark."""

    name: str
    # The arguments, usually as JSON text. If the model wrote a string instead of an object, this is the
    # content of the string, which may not be valid JSON.
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSyntax:
    is_bare: bool = False  # whether an answer with a call is JSON without tags, as in Llama 3
    # For each tool, the parameters whose value between tags is text, even if it is valid JSON.
    text_parameters: Mapping[str, Collection[str]] = field(default_factory=dict)


def text_parameters(tools: Sequence[object]) -> dict[str, set[str]]:
    """Map the name of each tool to its parameters that accept only text, or only text and null."""
    texts: dict[str, set[str]] = {}
    functions: list[Any] = [tool["function"] for tool in tools if isinstance(tool, dict)]
    for function in functions:
        properties = (function.get("parameters") or {}).get("properties")
        if isinstance(properties, dict):
            texts[function["name"]] = {name for name, schema in properties.items() if _is_text(schema)}
    return texts


def begins_bare_call(text: str) -> bool:
    return text.lstrip().startswith(("{", PYTHON_TAG))


def bare_call(text: str) -> ToolCall | None:
    """Return the call of an answer in the syntax of Llama 3, or None if the answer is anything else than one
    call. The chat template of Llama 3 takes one call in a message and refuses several."""
    return _parsed(text.strip().removeprefix(PYTHON_TAG))


def tagged_call(body: str, syntax: CallSyntax) -> ToolCall | None:
    """Return the tool call between the tags, or None if it is not valid."""
    body = body.strip()
    if body.startswith(_FUNCTION_OPEN):
        return _function_call(body, syntax)
    return _parsed(body)


def _parsed(text: str) -> ToolCall | None:
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: deep nesting
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return _new_call(call["name"], call.get("arguments", call.get("parameters", {})))


def _function_call(body: str, syntax: CallSyntax) -> ToolCall | None:
    name, opened, parameters = body.removeprefix(_FUNCTION_OPEN).partition(">")
    if not opened or not parameters.endswith(_FUNCTION_CLOSE):
        return None
    *closed, rest = parameters.removesuffix(_FUNCTION_CLOSE).split(_PARAMETER_CLOSE)
    texts = syntax.text_parameters.get(name, ())
    arguments: dict[str, object] = {}
    for parameter in closed:
        parameter = parameter.lstrip()
        key, opened, value = parameter.removeprefix(_PARAMETER_OPEN).partition(">")
        if not opened or not parameter.startswith(_PARAMETER_OPEN):
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = value if key in texts else _value(value)
    return None if rest.strip() else _new_call(name, arguments)


def _new_call(name: str, arguments: object) -> ToolCall | None:
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
    return ToolCall(name=_replace_surrogates(name), arguments=_replace_surrogates(arguments))


def _value(text: str) -> object:
    if text.strip() in _PYTHON_VALUES:
        return _PYTHON_VALUES[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):  # a JSON schema can also be true or false
        return False
    alternatives = schema["anyOf"] if isinstance(schema.get("anyOf"), list) else [schema]
    types = [item.get("type") for item in alternatives if isinstance(item, dict)]
    names = [name for value in types for name in (value if isinstance(value, list) else [value])]
    return "string" in names and all(name in ("string", "null") for name in names)


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()
