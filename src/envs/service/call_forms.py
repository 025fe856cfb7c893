"""Split an answer into its text and its tool calls, for the formats of DeepSeek, Llama 3.1 and Qwen3-Coder.

`src/envs/service/tool_calls.py` handles all other formats. It also parses arguments that are JSON text and
checks the calls of all formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# DeepSeek writes its special tokens with ｜ and ▁. DEEPSEEK_TOOL matches the tokens of tool calls, and
# DEEPSEEK_SPECIAL matches all others.
DEEPSEEK_SPECIAL = re.compile(r"<｜(?!tool▁)[^<>｜]*｜>")
DEEPSEEK_TOOL = re.compile(r"<｜tool▁[^<>｜]*｜>")
DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|<｜tool▁calls▁end｜>|\Z)",
    re.DOTALL,
)
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_V3_BODY = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*(?:```|\Z)", re.DOTALL)
FUNCTION = re.compile(
    r"(?:<tool_call>\s*)?<function=([^<>\s]+)>(.*?)(?:(</function>)(?:\s*</tool_call>)?|(?=<function=)|\Z)",
    re.DOTALL,
)
PARAMETER_END = "</parameter>"
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Qwen3.5 writes these values as in Python, not as in JSON.
PYTHON_VALUES: Mapping[str, object] = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """A call as it is written in an answer."""

    name: str  # "" if the answer contains no complete name
    arguments: str | Mapping[str, object]  # JSON text, or the parsed arguments
    problem: str = ""  # why the arguments cannot be read; "" if there was no problem


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCalls:
    content: str  # the text around the calls
    calls: Sequence[WrittenCall]


def deepseek_calls(text: str) -> WrittenCalls | None:
    """Return the calls between the special tokens of DeepSeek-V3 or V3.1, or None if there are none.

    >>> deepseek_calls("Yes.<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>").calls[0].name
    'f'
    """
    matches = list(DEEPSEEK_CALL.finditer(text))
    if not matches:
        return None
    calls = [_deepseek_call(match[1]) for match in matches]
    return WrittenCalls(content=DEEPSEEK_TOOL.sub("", DEEPSEEK_CALL.sub("", text)).strip(), calls=calls)


def function_calls(text: str, *, text_parameters: Mapping[str, Collection[str]]) -> WrittenCalls | None:
    """Return the calls of the form `<function=f>...</function>`, or None if there are none.

    `text_parameters` maps each tool to the parameters whose value is text. The values of other parameters are
    converted if they are JSON or in PYTHON_VALUES. Otherwise they are text.

    >>> written = function_calls("<function=f><parameter=n>1</parameter></function>", text_parameters={})
    >>> written.calls[0].arguments
    {'n': 1}
    """
    matches = list(FUNCTION.finditer(text))
    if not matches:
        return None
    calls = [
        _function_call(match[1], match[2], is_closed=bool(match[3]), texts=text_parameters.get(match[1], ()))
        for match in matches
    ]
    return WrittenCalls(content=FUNCTION.sub("", text).strip(), calls=calls)


def text_parameters(tools: Sequence[Mapping[str, object]]) -> dict[str, set[str]]:
    """Map the name of each tool to its parameters that accept only text, or only text and null."""
    texts: dict[str, set[str]] = {}
    for tool in tools:
        function: Any = tool["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}  # servers in Go write null
        texts[function["name"]] = {name for name, schema in properties.items() if _is_text(schema)}
    return texts


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):  # a JSON schema can also be true or false
        return False
    alternatives = [item for item in schema.get("anyOf") or [schema] if isinstance(item, Mapping)]
    types = [alternative.get("type") for alternative in alternatives]
    flat = [name for value in types for name in (value if isinstance(value, list) else [value])]
    return set(flat) - {"null"} == {"string"}


def _deepseek_call(text: str) -> WrittenCall:
    head, separator, body = text.partition(DEEPSEEK_SEPARATOR)
    if not separator:
        return WrittenCall(name="", arguments="")
    # DeepSeek-V3 and R1 write the type (`function`), the separator, the name and a code block with JSON.
    if head.strip() == "function" and not body.lstrip().startswith("{"):
        match = DEEPSEEK_V3_BODY.match(body)
        return WrittenCall(name=match[1], arguments=match[2]) if match else WrittenCall(name="", arguments="")
    return WrittenCall(name=head.strip(), arguments=body.strip())


def _function_call(name: str, body: str, *, is_closed: bool, texts: Collection[str]) -> WrittenCall:
    if body.lstrip().startswith("{"):
        return WrittenCall(name=name, arguments=body.strip())
    # Without `end`, PARAMETER would search the rest of the text again for each tag that is not closed, which
    # takes quadratic time.
    end = body.rfind(PARAMETER_END) + len(PARAMETER_END) if PARAMETER_END in body else 0
    if not is_closed or "<parameter=" in PARAMETER.sub("", body[:end]) + body[end:]:
        problem = f"the call of {name} is incomplete: a closing tag is missing"
        return WrittenCall(name=name, arguments={}, problem=problem)
    arguments = {
        match[1]: match[2] if match[1] in texts else _value(match[2])
        for match in PARAMETER.finditer(body, 0, end)
    }
    return WrittenCall(name=name, arguments=arguments)


def _value(text: str) -> object:
    if text.strip() in PYTHON_VALUES:
        return PYTHON_VALUES[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
