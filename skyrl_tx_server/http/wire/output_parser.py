"""Parse sampled text incrementally into reasoning, content and tool calls.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from skyrl_tx_server.engine.operations import StopReason
from skyrl_tx_server.http.wire.call_syntax import (
    CALL_CLOSE,
    CALL_OPEN,
    PYTHON_TAG,
    CallSyntax,
    ToolCall,
    bare_call,
    begins_bare_call,
    tagged_call,
)
from skyrl_tx_server.http.wire.chat_format import THINK_OPEN, TextPieces

THINK_CLOSE = "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    text: str


type ParsedDelta = ReasoningText | Content | ToolCall


class Part(StrEnum):
    """The part of a reply to which the next character belongs."""

    BEGINNING = "beginning"
    REASONING = "reasoning"
    AFTER_REASONING = "after_reasoning"
    CONTENT = "content"
    CALL = "call"
    AFTER_CALL = "after_call"
    BARE_CALL = "bare_call"  # an answer that may be a call without tags


class AnswerParser:
    """Splits text into `ParsedDelta` pieces. If `call_syntax` is None, tool calls are content. `part` is the
    part to which the first character of the text belongs."""

    def __init__(self, *, call_syntax: CallSyntax | None, part: Part = Part.BEGINNING) -> None:
        self._syntax = call_syntax
        self._is_tagged = call_syntax is not None and not call_syntax.is_bare
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
            case Part.BARE_CALL:
                return [bare_call(held) or Content(text=held)]
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
                return None if THINK_OPEN.startswith(start) else self._enter_answer(self._buffer)
            case Part.REASONING:
                before, closed, after = self._buffer.partition(THINK_CLOSE)
                if closed:
                    return self._enter(Part.AFTER_REASONING, after, ReasoningText(text=before.rstrip()))
                return self._emit_safe(ReasoningText, (THINK_CLOSE,))
            case Part.AFTER_REASONING | Part.AFTER_CALL:
                return self._enter_answer(self._buffer.lstrip()) if self._buffer.strip() else None
            case Part.CONTENT:
                before, opened, after = (
                    self._buffer.partition(CALL_OPEN) if self._is_tagged else (self._buffer, "", "")
                )
                if opened:
                    text = before.rstrip()
                    self._opening = before[len(text) :] + CALL_OPEN
                    return self._enter(Part.CALL, after, Content(text=text))
                return self._emit_safe(Content, (CALL_OPEN,) if self._is_tagged else ())
            case Part.BARE_CALL:
                return None
            case Part.CALL:
                body, closed, after = self._buffer.partition(CALL_CLOSE)
                if not closed or self._syntax is None:
                    return None
                call = tagged_call(body, self._syntax)
                if call is None:
                    return self._enter(Part.CONTENT, after, Content(text=self._opening + body + CALL_CLOSE))
                return self._enter(Part.AFTER_CALL, after, call)

    def _enter_answer(self, held: str) -> list[ParsedDelta] | None:
        """Begin the part after the reasoning. Return None if more text is needed."""
        if self._syntax is None or not self._syntax.is_bare:
            return self._enter(Part.CONTENT, held)
        if PYTHON_TAG.startswith(held.lstrip()):
            return None
        return self._enter(Part.BARE_CALL if begins_bare_call(held) else Part.CONTENT, held)

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
        return pieces + self._noted(self._parser.flush())

    def finish_reason(self, reason: StopReason) -> str:
        return "tool_calls" if self._has_tool_call and reason is StopReason.STOP else str(reason)

    def _parse(self, text: str) -> list[ParsedDelta]:
        return self._noted(self._parser.add(text))

    def _noted(self, pieces: list[ParsedDelta]) -> list[ParsedDelta]:
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
