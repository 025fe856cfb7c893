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
class RawCalls:
    """The calls that were recognized in an answer, before they are checked."""

    content: str = ""  # the text around the calls
    texts: Sequence[str] = ()  # the calls as JSON
    calls: Sequence[object] = ()  # the calls as objects with a name and arguments, which may be JSON text
    problem: str = ""  # why the calls cannot be read; "" if there was no problem
    num_repaired: int = 0  # JSON texts to which closing brackets were added


def deepseek_calls(text: str) -> RawCalls | None:
    """Return the calls between the special tokens of DeepSeek-V3 or V3.1, or None if there are none.

    >>> deepseek_calls("Yes.<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>").calls
    [{'name': 'f', 'arguments': '{}'}]
    """
    matches = list(DEEPSEEK_CALL.finditer(text))
    if not matches:
        return None
    calls = [_deepseek_call(match[1]) for match in matches]
    return RawCalls(content=DEEPSEEK_TOOL.sub("", DEEPSEEK_CALL.sub("", text)).strip(), calls=calls)


def function_calls(text: str, *, text_parameters: Mapping[str, Collection[str]]) -> RawCalls | None:
    """Return the calls of the form `<function=f>...</function>`, or None if there are none.

    `text_parameters` maps each tool to the parameters whose value is text. The values of other parameters are
    converted if they are JSON or in PYTHON_VALUES. Otherwise they are text.

    >>> function_calls("<function=f><parameter=n>1</parameter></function>", text_parameters={}).calls
    [{'name': 'f', 'arguments': {'n': 1}}]
    """
    matches = list(FUNCTION.finditer(text))
    if not matches:
        return None
    calls, problems = list[object](), list[str]()
    for name, body, closing_tag in (match.groups() for match in matches):
        arguments = _arguments(body, is_closed=bool(closing_tag), texts=text_parameters.get(name, ()))
        if arguments is None:
            problems.append(f"the call of {name} is incomplete: a closing tag is missing")
        calls.append({"name": name, "arguments": arguments})
    return RawCalls(content=FUNCTION.sub("", text).strip(), calls=calls, problem="; ".join(problems))


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


def _deepseek_call(text: str) -> Mapping[str, str]:
    """Return the name and the arguments of a call as texts. The name is empty if it is incomplete."""
    head, separator, body = text.partition(DEEPSEEK_SEPARATOR)
    if not separator:
        return {"name": "", "arguments": ""}
    # DeepSeek-V3 and R1 write the type (`function`), the separator, the name and a code block with JSON.
    if head.strip() == "function" and not body.lstrip().startswith("{"):
        match = DEEPSEEK_V3_BODY.match(body)
        return {"name": match[1], "arguments": match[2]} if match else {"name": "", "arguments": ""}
    return {"name": head.strip(), "arguments": body.strip()}


def _arguments(body: str, *, is_closed: bool, texts: Collection[str]) -> str | Mapping[str, object] | None:
    """Return the arguments of a call as JSON text or as values; None if a closing tag is missing."""
    if body.lstrip().startswith("{"):
        return body.strip()
    # Without `end`, PARAMETER would search the rest of the text again for each tag that is not closed, which
    # takes quadratic time.
    end = body.rfind(PARAMETER_END) + len(PARAMETER_END) if PARAMETER_END in body else 0
    if not is_closed or "<parameter=" in PARAMETER.sub("", body[:end]) + body[end:]:
        return None
    return {
        match[1]: match[2] if match[1] in texts else _value(match[2])
        for match in PARAMETER.finditer(body, 0, end)
    }


def _value(text: str) -> object:
    if text.strip() in PYTHON_VALUES:
        return PYTHON_VALUES[text.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
