"""Parse sampled text incrementally into reasoning, content, and tool calls in the Qwen/Hermes format.

    <think>
    Let me look.
    </think>

    I list the files.
    <tool_call>
    {"name": "ls", "arguments": {"path": "/"}}
    </tool_call>

Text that may begin a tag or a stop string is held back until later text shows whether it does. A stream and a
complete reply therefore have the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from skyrl_tx_server.engine.operations import StopReason
from skyrl_tx_server.http.wire.chat_format import THINK_OPEN, TextPieces

THINK_CLOSE = "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call. An unpaired surrogate in the model's JSON becomes a question mark."""

    name: str
    # The arguments, usually as JSON text. If the model wrote a string instead of an object, this is the
    # content of the string, which may not be valid JSON.
    arguments: str


type ParsedDelta = ReasoningText | Content | ToolCall


class Part(StrEnum):
    """The part of a reply to which the next character belongs."""

    BEGINNING = "beginning"
    REASONING = "reasoning"
    AFTER_REASONING = "after_reasoning"
    CONTENT = "content"
    CALL = "call"
    AFTER_CALL = "after_call"


class AnswerParser:
    """Splits text into `ParsedDelta` pieces. Without `parses_calls`, tool calls are content. `part` is the
    part to which the first character of the text belongs."""

    def __init__(self, *, parses_calls: bool, part: Part = Part.BEGINNING) -> None:
        self._parses_calls = parses_calls
        self._part = part
        self._buffer = ""
        self._opening = ""  # the opening tag of the current call and the white space before it

    def add(self, text: str) -> list[ParsedDelta]:
        self._buffer += text
        pieces: list[ParsedDelta] = []
        while (step := self._next()) is not None:
            pieces += step
        return pieces

    def flush(self) -> list[ParsedDelta]:
        """Return the text that is still held back. The caller calls this method when the sample has ended."""
        held, self._buffer = self._buffer, ""
        match self._part:
            case Part.REASONING:
                piece = ReasoningText(text=held)
            case Part.CALL:
                piece = Content(text=self._opening + held)
            case Part.AFTER_CALL | Part.AFTER_REASONING:
                piece = Content(text=held.strip())
            case Part.BEGINNING | Part.CONTENT:
                piece = Content(text=held)
        return [piece] if piece.text else []

    def _next(self) -> list[ParsedDelta] | None:
        """Parse the beginning of the buffer. Return None if more text is needed."""
        match self._part:
            case Part.BEGINNING:
                start = self._buffer.lstrip()
                if start.startswith(THINK_OPEN) and start != THINK_OPEN:
                    return self._enter(Part.REASONING, start.removeprefix(THINK_OPEN).removeprefix("\n"))
                return None if THINK_OPEN.startswith(start) else self._enter(Part.CONTENT, self._buffer)
            case Part.REASONING:
                before, closed, after = self._buffer.partition(THINK_CLOSE)
                if closed:
                    return self._enter(Part.AFTER_REASONING, after, ReasoningText(text=before.rstrip()))
                return self._emit_safe(ReasoningText, (THINK_CLOSE,))
            case Part.AFTER_REASONING | Part.AFTER_CALL:
                return self._enter(Part.CONTENT, self._buffer.lstrip()) if self._buffer.strip() else None
            case Part.CONTENT:
                before, opened, after = (
                    self._buffer.partition(CALL_OPEN) if self._parses_calls else (self._buffer, "", "")
                )
                if opened:
                    text = before.rstrip()
                    self._opening = before[len(text) :] + CALL_OPEN
                    return self._enter(Part.CALL, after, Content(text=text))
                return self._emit_safe(Content, (CALL_OPEN,) if self._parses_calls else ())
            case Part.CALL:
                body, closed, after = self._buffer.partition(CALL_CLOSE)
                if not closed:
                    return None
                call = _tool_call(body)
                if call is None:
                    return self._enter(Part.CONTENT, after, Content(text=self._opening + body + CALL_CLOSE))
                return self._enter(Part.AFTER_CALL, after, call)

    def _enter(self, part: Part, held: str, piece: ParsedDelta | None = None) -> list[ParsedDelta]:
        self._part, self._buffer = part, held
        return [] if piece is None or (not isinstance(piece, ToolCall) and not piece.text) else [piece]

    def _emit_safe(
        self, kind: type[ReasoningText] | type[Content], tags: Sequence[str]
    ) -> list[ParsedDelta] | None:
        """Return the text that cannot be the beginning of a tag. White space before a tag belongs to the
        tag."""
        safe = len(self._buffer) - longest_beginning(self._buffer, tags)
        text = self._buffer[:safe].rstrip() if tags else self._buffer
        if not text:
            return None
        self._buffer = self._buffer[len(text) :]
        return [kind(text=text)]


class StopCutter:
    """Truncates text before its first stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = stop_strings
        self._buffer = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Return the text that cannot be part of a stop string."""
        if self.stopped:
            return ""
        held = self._buffer + text
        positions = [start for stop in self._stop_strings if (start := held.find(stop)) >= 0]
        if positions:
            self.stopped, self._buffer = True, ""
            return held[: min(positions)]
        safe = len(held) - longest_beginning(held, self._stop_strings)
        self._buffer = held[safe:]
        return held[:safe]

    def completed_by(self, text: str) -> bool:
        """Whether `text` would complete a stop string."""
        return any(stop in self._buffer + text for stop in self._stop_strings)

    def flush(self) -> str:
        held, self._buffer = self._buffer, ""
        return held


class Answer:
    """Converts the token ids of one sample to pieces. The text of a stop token is omitted, and so is a stop
    string with all text after it."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str], parser: AnswerParser
    ) -> None:
        self._text = TextPieces(decode)
        self._cutter = StopCutter(stop_strings)
        self._parser = parser
        self._has_tool_call = False

    def add(self, ids: Sequence[int]) -> list[ParsedDelta]:
        return self._parse(self._cutter.add(self._text.add(ids)))

    def finish(self, ids: Sequence[int], reason: StopReason) -> list[ParsedDelta]:
        """Add the last tokens of a sample that ended for `reason`, and return the remaining pieces."""
        pieces: list[ParsedDelta] = []
        if reason is StopReason.STOP:
            pieces += self.add(ids[:-1])
            last_text = self._text.add(ids[-1:])
            if self._cutter.completed_by(last_text):
                pieces += self._parse(self._cutter.add(last_text))
        else:
            pieces += self.add(ids)
            pieces += self._parse(self._cutter.add(self._text.flush()))
        pieces += self._parse(self._cutter.flush())
        return pieces + self._parser.flush()

    def finish_reason(self, reason: StopReason) -> str:
        return "tool_calls" if self._has_tool_call and reason is StopReason.STOP else str(reason)

    def _parse(self, text: str) -> list[ParsedDelta]:
        pieces = self._parser.add(text)
        self._has_tool_call |= any(isinstance(piece, ToolCall) for piece in pieces)
        return pieces


def longest_beginning(text: str, tags: Sequence[str]) -> int:
    """Return how many of the last characters of `text` may be the beginning of one of `tags`.

    >>> longest_beginning("see </thi", ["</think>"])
    5
    """
    lengths = [
        length
        for tag in tags
        for length in range(1, min(len(tag) - 1, len(text)) + 1)
        if text.endswith(tag[:length])
    ]
    return max(lengths, default=0)


def _tool_call(body: str) -> ToolCall | None:
    """Return the tool call between the tags, or None if it is not valid."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: deep nesting
        return None
    if not isinstance(name, str):
        return None
    return ToolCall(name=_replace_surrogates(name), arguments=_replace_surrogates(arguments))


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()
