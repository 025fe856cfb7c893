"""What an agent's answer asks to be called. One parser for every environment, with its strategies in a fixed order:

    whole      {"name": "f", "arguments": {...}}, or a list of such, and nothing else
    tagged     <tool_call>{...}</tool_call>, the form of Qwen's and Hermes' templates
    fenced     the same object between ``` and ```
    embedded   the same object somewhere in a text
    react      Action: f / Action Input: {...}
    code       f(id="#1") on a line of its own, for a known tool
    bare_name  the name of a known tool and nothing else

Whatever matches none of them is said to the user. JSON whose last brackets are missing is mended and counted; JSON that ends inside a
string or number is a failure, and nothing is called. DEBUG_PARSER=1 logs every parse.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger(__name__)

MAX_MENDED = 3  # missing closing brackets
SPECIAL = re.compile(r"<\|[a-z_]+\|>")
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FENCED = re.compile(r"```[a-z]*\s*(.*?)(?:```|\Z)", re.DOTALL)
EMBEDDED = re.compile(r'[{\[]\s*(?:\{\s*)?"(?:name|arguments)"\s*:')
REACT = re.compile(r"^\s*Action:[ \t]*(\S+)[ \t]*$\s*Action Input:[ \t]*(.*)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^[ \t]*([A-Za-z_]\w*)\((.*)\)[ \t]*$", re.MULTILINE)


class Strategy(StrEnum):
    WHOLE = "whole"
    TAGGED = "tagged"
    FENCED = "fenced"
    EMBEDDED = "embedded"
    REACT = "react"
    CODE = "code"
    BARE_NAME = "bare_name"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """An answer, taken apart."""

    content: str = ""  # what the user gets to see
    calls: Sequence[ToolCall] = ()
    strategy: Strategy | None = None  # None: no call was attempted
    problem: str = ""  # why a call, or its arguments, could not be read; "" where there was nothing wrong
    num_mended: int = 0

    @property
    def counts(self) -> dict[str, float]:
        """To be added up over an episode: `parse_failures / parse_attempts` is the parse failure rate."""
        return {
            "parse_attempts": float(self.strategy is not None),
            "parse_failures": float(bool(self.problem)),
            "parse_recovered": float(self.num_mended),
        }


class Unreadable(ValueError):
    """What stands where a call should stand is none. A failure of the agent, never raised to callers."""


def parse(answer: str, tools: Collection[str]) -> Parsed:
    """The first strategy that finds an attempted call decides. `tools` are the names that a text may call without JSON.

    A name that is none of them is passed on: the environment has an error for that.

    >>> parse('One moment.<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>', {"f"}).calls
    [ToolCall(name='f', arguments={'n': 1})]
    >>> parse("Hello!", {"f"})
    Parsed(content='Hello!', calls=(), strategy=None, problem='', num_mended=0)
    """
    text = visible(answer)
    parsed = next(
        (found for strategy in STRATEGIES if (found := strategy(text, tools)) is not None),
        Parsed(content=text),
    )
    logger.debug(
        "parsed %r: strategy %s, calls %s, problem %r",
        answer,
        parsed.strategy,
        list(parsed.calls),
        parsed.problem,
    )
    return parsed


def visible(answer: str) -> str:
    """The answer without special tokens and thoughts, finished or not."""
    text = THOUGHT.sub("", answer)
    return SPECIAL.sub("", text.rpartition("</think>")[2]).strip()


def _whole(text: str, tools: Collection[str]) -> Parsed | None:
    return _read([text], Strategy.WHOLE, content="") if _looks_like_a_call(text, tools) else None


def _tagged(text: str, tools: Collection[str]) -> Parsed | None:
    parts = TAGGED.findall(text)
    return _read(parts, Strategy.TAGGED, content=TAGGED.sub("", text).strip()) if parts else None


def _fenced(text: str, tools: Collection[str]) -> Parsed | None:
    parts = [part for part in FENCED.findall(text) if _looks_like_a_call(part, tools)]
    return _read(parts, Strategy.FENCED, content=FENCED.sub("", text).strip()) if parts else None


def _embedded(text: str, tools: Collection[str]) -> Parsed | None:
    found = EMBEDDED.search(text)
    if found is None:
        return None
    before, part = text[: found.start()], text[found.start() :]
    try:
        _, end = json.JSONDecoder().raw_decode(part)
    except (ValueError, RecursionError):
        end = len(part)
    if not _looks_like_a_call(part[:end], tools):
        return None
    return _read([part[:end]], Strategy.EMBEDDED, content=(before + part[end:]).strip())


def _react(text: str, tools: Collection[str]) -> Parsed | None:
    found = REACT.search(text)
    if found is None:
        return None
    content = text[: found.start()].strip()
    try:
        arguments, num_mended = _json(found[2].strip() or "{}")
    except Unreadable as error:
        return Parsed(content=content, strategy=Strategy.REACT, problem=str(error))
    return _parsed(
        [{"name": found[1], "arguments": arguments}], Strategy.REACT, content=content, num_mended=num_mended
    )


def _code(text: str, tools: Collection[str]) -> Parsed | None:
    found = next((match for match in CODE.finditer(text) if match[1] in tools), None)
    if found is None:
        return None
    content = (text[: found.start()] + text[found.end() :]).strip()
    try:
        call = ast.parse(found[0].strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("it is more than one call")
        if call.args:
            raise ValueError("arguments need names")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(arguments)  # Python has values that no tool knows, {1, 2} and b"x" among them
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        return Parsed(
            content=content, strategy=Strategy.CODE, problem=f"{found[0].strip()} cannot be read: {error}"
        )
    return _parsed([{"name": found[1], "arguments": arguments}], Strategy.CODE, content=content)


def _bare_name(text: str, tools: Collection[str]) -> Parsed | None:
    return (
        _parsed([{"name": text, "arguments": {}}], Strategy.BARE_NAME, content="") if text in tools else None
    )


STRATEGIES: tuple[Callable[[str, Collection[str]], Parsed | None], ...] = (
    _whole,
    _tagged,
    _fenced,
    _embedded,
    _react,
    _code,
    _bare_name,
)


def _read(parts: Sequence[str], strategy: Strategy, *, content: str) -> Parsed:
    """The calls of some pieces of JSON. One that cannot be read spoils all: a half of what was meant is not called."""
    values: list[object] = []
    num_mended = 0
    for part in parts:
        try:
            value, mended = _json(part.strip())
        except Unreadable as error:
            return Parsed(content=content, strategy=strategy, problem=str(error))
        values += value if isinstance(value, list) else [value]
        num_mended += mended
    return _parsed(values, strategy, content=content, num_mended=num_mended)


def _parsed(values: Sequence[object], strategy: Strategy, *, content: str, num_mended: int = 0) -> Parsed:
    """Arguments that are no object become none at all, which is a failure of its own."""
    calls, problems = [], []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return Parsed(content=content, strategy=strategy, problem="a call needs a name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments, mended = _json(arguments)
                num_mended += mended
            except Unreadable as error:
                return Parsed(content=content, strategy=strategy, problem=str(error))
        if not isinstance(arguments, dict):
            problems.append(f"the arguments of {value['name']} are no object")
            arguments = {}
        calls.append(ToolCall(name=value["name"], arguments=arguments))
    return Parsed(
        content=content, calls=calls, strategy=strategy, problem="; ".join(problems), num_mended=num_mended
    )


def _looks_like_a_call(text: str, tools: Collection[str]) -> bool:
    """Not every object with a name is a call; one that is broken may have been meant as one."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return EMBEDDED.match(text) is not None and error.msg != "Extra data"
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets thousands deep
        return EMBEDDED.match(text) is not None
    first = value[0] if isinstance(value, list) and value else value
    return (
        isinstance(first, dict)
        and "name" in first
        and ("arguments" in first or "parameters" in first or first["name"] in tools)
    )


def _json(text: str) -> tuple[object, int]:
    """(value, 1 if closing brackets had to be added). Raises Unreadable."""
    try:
        return json.loads(text), 0
    except (ValueError, RecursionError) as error:
        problem = str(error)
    try:
        return json.loads(text + _missing_brackets(text)), 1
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error if isinstance(error, Unreadable) else problem}") from error


def _missing_brackets(text: str) -> str:
    """What would close the brackets that are open at the text's end. Raises Unreadable where that would be a guess."""
    open_brackets: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string, escaped = escaped or character != '"', character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            open_brackets.append("}" if character == "{" else "]")
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
    if in_string or text[-1:].isdigit():
        raise Unreadable(f"it ends inside a {'string' if in_string else 'number'}")
    if not 1 <= len(open_brackets) <= MAX_MENDED:
        raise Unreadable(f"{len(open_brackets)} brackets are open")
    return "".join(reversed(open_brackets))
