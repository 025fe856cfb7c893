"""The parser of tool calls, for the agent's answers in env=fleet and in service domains (tasks with tools and
a user simulator, as in env=tau_bench), and for messages of user simulators that have tools. It tries these
strategies in order:

    whole      {"name": "f", "arguments": {...}}, or a list of such objects, and nothing else
    tagged     <tool_call>{...}</tool_call>, as in the chat templates of Qwen and Hermes
    deepseek   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>,
               as in the chat templates of DeepSeek
    function   <function=f>{...}</function>, as in Llama 3.1, or
               <function=f><parameter=id>123</parameter></function>, with one <parameter> for each argument,
               as in the chat templates of Qwen3-Coder and Qwen3.5
    fenced     the JSON of `whole` between ``` and ```
    embedded   the JSON of `whole` inside other text
    react      Action: f / Action Input: {...}
    code       f(id="#1") on a line of its own, for a known tool
    bare_name  the name of a known tool and nothing else

Any other answer is a message to the user or, in env=fleet, the final answer. If up to three closing brackets
of JSON are missing, the parser adds them and counts the repair. JSON that ends inside a string or number is a
parse failure, and no tool is called. JSON may also have the key `parameters` in place of `arguments`, and
arguments as JSON text. DEBUG_PARSER=1 logs every parse.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from src.envs.service.call_forms import (
    DEEPSEEK_SPECIAL,
    DEEPSEEK_TOOL,
    RawCalls,
    deepseek_calls,
    function_calls,
)

logger = logging.getLogger(__name__)

MAX_ADDED_BRACKETS = 3  # closing brackets that the parser may add
LEVELS_AROUND_ARGUMENTS = 50  # more than the JSON levels that contain the arguments in the files of a run
SPECIAL = re.compile(r"<\|[a-z_]+\|>")
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FENCED = re.compile(r"```[a-z]*\s*(.*?)(?:```|\Z)", re.DOTALL)
EMBEDDED = re.compile(r'[{\[]\s*(?:\{\s*)?"(?:name|arguments)"\s*:')
REACT = re.compile(r"^[ \t]*Action:[ \t]*(\S+)[ \t]*$\s*Action Input:[ \t]*(.*)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^[ \t]*([A-Za-z_]\w*)\((.*)\)[ \t]*$", re.MULTILINE)


class Strategy(StrEnum):
    WHOLE = "whole"
    TAGGED = "tagged"
    DEEPSEEK = "deepseek"
    FUNCTION = "function"
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
class ParsedAnswer:
    """The text and the tool calls of an answer."""

    content: str = ""  # the text around the calls; without calls, the message to the user
    calls: Sequence[ToolCall] = ()
    strategy: Strategy | None = None  # None: the answer contains no call, valid or not
    problem: str = ""  # why a call or its arguments could not be parsed; "" if there was no problem
    num_repaired: int = 0  # JSON texts to which closing brackets were added

    @property
    def counts(self) -> dict[str, float]:
        """The counts of this answer, which `ServiceEnv` adds up over an episode. The parse failure rate is
        `parse_failures / parse_attempts`. `parse_attempts` counts the answers with a call, valid or not.
        """
        return {
            "parse_attempts": float(self.strategy is not None),
            "parse_failures": float(bool(self.problem)),
            "parse_recovered": float(self.num_repaired),
        }


class ParseError(ValueError):
    """A call cannot be parsed. Raised and handled within this module only."""


def parse(
    answer: str, tools: Collection[str], *, text_parameters: Mapping[str, Collection[str]] | None = None
) -> ParsedAnswer:
    """Parse an answer with the first strategy that finds a call, valid or not.

    `tools` are the names of the known tools. The strategies `code` and `bare_name` find only calls of these
    tools. The strategies `whole`, `fenced` and `embedded` also require a known tool if the JSON is complete
    and has a text as its name and no arguments. In all other cases, a call of an unknown tool is returned
    too, and the environment reports the error.

    `text_parameters` maps each tool to the parameters whose values are text, so that
    `<parameter=id>123</parameter>` is not read as a number.

    >>> parse('One moment.<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>', {"f"}).calls
    [ToolCall(name='f', arguments={'n': 1})]
    >>> parse("Hello!", {"f"})
    ParsedAnswer(content='Hello!', calls=(), strategy=None, problem='', num_repaired=0)
    """
    text = without_thoughts(answer)
    strategies: dict[Strategy, Callable[[str, Collection[str]], RawCalls | None]] = {
        Strategy.WHOLE: _whole,
        Strategy.TAGGED: _tagged,
        Strategy.DEEPSEEK: lambda text, tools: deepseek_calls(text),
        Strategy.FUNCTION: lambda text, tools: function_calls(text, text_parameters=text_parameters or {}),
        Strategy.FENCED: _fenced,
        Strategy.EMBEDDED: _embedded,
        Strategy.REACT: _react,
        Strategy.CODE: _code,
        Strategy.BARE_NAME: _bare_name,
    }
    parsed = next(
        (
            _parsed(raw, strategy)
            for strategy, find in strategies.items()
            if (raw := find(text, tools)) is not None
        ),
        ParsedAnswer(content=DEEPSEEK_TOOL.sub("", text).strip()),
    )
    logger.debug(
        "parsed %r: strategy %s, calls %s, problem %r",
        answer,
        parsed.strategy,
        list(parsed.calls),
        parsed.problem,
    )
    return parsed


def without_thoughts(answer: str) -> str:
    """Return the answer without special tokens and thoughts. A thought without an opening or a closing tag is
    also removed. The special tokens of DeepSeek's tool calls are kept."""
    text = THOUGHT.sub("", answer)
    return DEEPSEEK_SPECIAL.sub("", SPECIAL.sub("", text.rpartition("</think>")[2])).strip()


def _whole(text: str, tools: Collection[str]) -> RawCalls | None:
    return RawCalls(texts=[text]) if _looks_like_a_call(text, tools) else None


def _tagged(text: str, tools: Collection[str]) -> RawCalls | None:
    parts = TAGGED.findall(text)
    if not parts or parts[0].lstrip().startswith("<function="):
        return None
    return RawCalls(texts=parts, content=TAGGED.sub("", text).strip())


def _fenced(text: str, tools: Collection[str]) -> RawCalls | None:
    parts = [part for part in FENCED.findall(text) if _looks_like_a_call(part, tools)]
    return RawCalls(texts=parts, content=FENCED.sub("", text).strip()) if parts else None


def _embedded(text: str, tools: Collection[str]) -> RawCalls | None:
    match = EMBEDDED.search(text)
    if match is None:
        return None
    before, part = text[: match.start()], text[match.start() :]
    try:
        _, end = json.JSONDecoder().raw_decode(part)
    except (ValueError, RecursionError):
        end = len(part)
    if not _looks_like_a_call(part[:end], tools):
        return None
    return RawCalls(texts=[part[:end]], content=(before + part[end:]).strip())


def _react(text: str, tools: Collection[str]) -> RawCalls | None:
    match = REACT.search(text)
    if match is None:
        return None
    content = text[: match.start()].strip()
    try:
        arguments, num_repaired = _json(match[2].strip() or "{}")
    except ParseError as error:
        return RawCalls(content=content, problem=str(error))
    call = {"name": match[1], "arguments": arguments}
    return RawCalls(content=content, calls=[call], num_repaired=num_repaired)


def _code(text: str, tools: Collection[str]) -> RawCalls | None:
    match = next((call for call in CODE.finditer(text) if call[1] in tools), None)
    if match is None:
        return None
    content = (text[: match.start()] + text[match.end() :]).strip()
    try:
        call = ast.parse(match[0].strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("it is more than one call")
        if call.args or any(keyword.arg is None for keyword in call.keywords):  # f(1) or f(**{...})
            raise ValueError("arguments need names")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(arguments)  # rejects Python values without a JSON form, such as {1, 2} and b"x"
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        return RawCalls(content=content, problem=f"{match[0].strip()} cannot be read: {error}")
    return RawCalls(content=content, calls=[{"name": match[1], "arguments": arguments}])


def _bare_name(text: str, tools: Collection[str]) -> RawCalls | None:
    return RawCalls(calls=[{"name": text, "arguments": {}}]) if text in tools else None


def _parsed(raw: RawCalls, strategy: Strategy) -> ParsedAnswer:
    """Parse and check the calls. If a JSON text is invalid, or a call has no name or has invalid JSON as
    arguments, no call is returned.

    Arguments that are not an object are replaced by {} and reported as a problem.
    """
    answer = ParsedAnswer(content=raw.content, strategy=strategy)
    if raw.problem:
        return replace(answer, problem=raw.problem)
    values, calls, problems, num_repaired = [*raw.calls], list[ToolCall](), list[str](), raw.num_repaired
    try:
        for text in raw.texts:
            value, num_added = _json(text.strip())
            values += value if isinstance(value, list) else [value]
            num_repaired += num_added
        for value in values:
            if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
                raise ParseError("a call has no name")
            arguments = value.get("arguments", value.get("parameters", {}))
            if isinstance(arguments, str):
                arguments, num_added = _json(arguments)
                num_repaired += num_added
            if not isinstance(arguments, dict):
                problems.append(f"the arguments of {value['name']} are not a JSON object")
                arguments = {}
            calls.append(ToolCall(name=value["name"], arguments=arguments))
        stored: object = [call.arguments for call in calls]
        for _ in range(LEVELS_AROUND_ARGUMENTS):
            stored = [stored]
        json.dumps(stored)  # raises RecursionError if the files of a run cannot contain the arguments
    except (ParseError, RecursionError) as error:
        return replace(answer, problem=str(error))
    return replace(answer, calls=calls, problem="; ".join(problems), num_repaired=num_repaired)


def _looks_like_a_call(text: str, tools: Collection[str]) -> bool:
    """Return whether the text is a call or a broken call. A JSON object with a name and no arguments is a
    call if the name is that of a known tool, and a broken call if the name is a list or an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return EMBEDDED.match(text) is not None and error.msg != "Extra data"
    except (ValueError, RecursionError):  # e.g. a number with thousands of digits or deeply nested brackets
        return EMBEDDED.match(text) is not None
    first = value[0] if isinstance(value, list) and value else value
    return (
        isinstance(first, dict)
        and "name" in first
        and (
            "arguments" in first
            or "parameters" in first
            or isinstance(first["name"], (list, dict))
            or first["name"] in tools
        )
    )


def _json(text: str) -> tuple[object, int]:
    """Parse JSON. Return the value, and 1 if closing brackets were added, else 0.

    Raises ParseError if the text is not JSON and cannot be repaired.
    """
    try:
        return json.loads(text), 0
    except (ValueError, RecursionError) as error:
        problem = str(error)
    try:
        return json.loads(text + _missing_brackets(text)), 1
    except (ValueError, RecursionError) as error:
        raise ParseError(f"no JSON: {error if isinstance(error, ParseError) else problem}") from error


def _missing_brackets(text: str) -> str:
    """Return the brackets that close the text, or "" if no bracket is open.

    Raises ParseError if the text ends inside a string, if more than MAX_ADDED_BRACKETS brackets are open, or
    if brackets are open and the text ends with a digit, because the number may be incomplete.
    """
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
    if in_string or (open_brackets and text[-1:].isdigit()):
        raise ParseError(f"it ends inside a {'string' if in_string else 'number'}")
    if len(open_brackets) > MAX_ADDED_BRACKETS:
        raise ParseError(f"{len(open_brackets)} brackets are open")
    return "".join(reversed(open_brackets))
