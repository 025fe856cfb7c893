"""Failure patterns of service trials, recognized in the conversation, and faults of the user simulator.

A failed trial can show several patterns, each at most once. Tools report errors as text, so patterns are
matched against words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

from src.core.trajectory import StopReason, Trajectory
from src.envs.service.user_simulator import OUT_OF_SCOPE
from src.learning.filters import OVERLONG
from src.learning.played_groups import SOLVED

NUM_REPEATS = 3  # a user simulator that gives the same answer this often in a row is stuck
LONG_ANSWER = 40  # characters; shorter answers, such as a consent, may be repeated


class Pattern(StrEnum):
    ARGUMENTS = "argument_error"  # a call with invalid arguments
    AUTHORISATION = "authorisation"  # an action that the rules or the state of the database forbid
    NOT_FOUND = "not_found"  # a call about an object that does not exist, or of an unknown tool
    OTHER_ERROR = "other_tool_error"
    UNREADABLE = "unreadable_answer"  # a call that could not be parsed, or an empty answer
    CONTEXT_OVERFLOW = "context_overflow"
    LIMIT = "other_limit"  # a limit of turns, time or errors
    NOTHING_DONE = "nothing_done"  # the trial ended without a tool call
    FALSE_COMPLETION = "false_completion"  # the agent ended the trial as if the task were solved
    USER_SIMULATOR = "customer_fault"  # the user simulator left its scenario or its role, or repeated itself


# The first pattern that matches the text of an error.
ERRORS = (
    (Pattern.UNREADABLE, r"could not be read|answer was empty"),
    (
        Pattern.AUTHORISATION,
        r"authori[sz]|permission|forbidden|denied|not allowed|cannot be|belong|eligible|insufficient",
    ),
    (Pattern.NOT_FOUND, r"not found|not exist|there is no|no such|unknown"),
    (
        Pattern.ARGUMENTS,
        r"argument|parameter|validation|invalid|missing|required|takes|expected|must|should"
        r"|valid (string|number|integer)",
    ),
)


def patterns(trajectory: Trajectory) -> frozenset[Pattern]:
    """Return the patterns of a failed trial; none for a solved trial."""
    if trajectory.reward >= SOLVED:
        return frozenset()
    shown = {pattern_of(text) for text in errors(trajectory.conversation)}
    metrics = trajectory.metrics
    if metrics.get("unusable_answers") or metrics.get("parse_failures"):
        shown.add(Pattern.UNREADABLE)
    if user_simulator_faults(trajectory):
        shown.add(Pattern.USER_SIMULATOR)
    if trajectory.stop_reason is StopReason.CONTEXT_LENGTH:
        shown.add(Pattern.CONTEXT_OVERFLOW)
    elif trajectory.stop_reason in OVERLONG or metrics.get("too_many_errors"):
        shown.add(Pattern.LIMIT)
    elif metrics.get("tool_calls") == 0:
        shown.add(Pattern.NOTHING_DONE)
    elif Pattern.USER_SIMULATOR not in shown:
        shown.add(Pattern.FALSE_COMPLETION)
    return frozenset(shown)


def errors(conversation: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the texts of the tool results that are errors."""
    results = [str(message.get("content") or "") for message in conversation if message.get("role") == "tool"]
    return [text for text in results if text.startswith("Error")]


def pattern_of(error: str) -> Pattern:
    """Return the pattern of one error.

    >>> texts = ("Error: Order not found", "Error: Non-pending order cannot be cancelled", "Error: 7")
    >>> [str(pattern_of(text)) for text in texts]
    ['not_found', 'authorisation', 'other_tool_error']
    """
    return next(
        (pattern for pattern, words in ERRORS if re.search(words, error, re.IGNORECASE)), Pattern.OTHER_ERROR
    )


def user_simulator_faults(trajectory: Trajectory) -> list[str]:
    """Return the faults of the user simulator in a failed trial, in words."""
    messages = [
        str(message.get("content") or "")
        for message in trajectory.conversation[1:]
        if message.get("role") == "user"
    ]
    messages = [text for text in messages if not text.startswith("Error")]  # errors come from the environment
    faults: list[str] = []
    if any(OUT_OF_SCOPE in text for text in messages):
        faults.append("left its scenario")
    if any("<tool_call>" in text or "<think>" in text for text in messages):
        faults.append("left its role")
    if is_stuck(trajectory.conversation):
        faults.append("repeated itself")
    if trajectory.metrics.get("user_tool_errors"):
        faults.append("could not use its own tools")
    return faults


def is_stuck(conversation: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the user simulator gave the same long answer to several different questions in a row."""
    spoken = [
        message
        for message in conversation
        if message.get("role") in ("assistant", "user") and message.get("content")
    ]
    exchanges = [
        (str(before["content"]), str(after["content"]))
        for before, after in pairwise(spoken)
        if (before["role"], after["role"]) == ("assistant", "user")
    ]
    windows = (exchanges[start : start + NUM_REPEATS] for start in range(len(exchanges) - NUM_REPEATS + 1))
    return any(
        len({answer for _, answer in window}) == 1
        and len(window[0][1]) >= LONG_ANSWER
        and len({question for question, _ in window}) == NUM_REPEATS
        for window in windows
    )


def pattern_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Return the number of failed trials that show each pattern, zeros included."""
    counts = Counter(pattern for trajectory in trajectories for pattern in patterns(trajectory))
    return {str(pattern): counts[pattern] for pattern in Pattern}
