"""Why trials fail, told from what was said: the patterns of seed 004, and what was the customer's fault rather than the agent's.

A failed trial shows each pattern once or not at all, and may show several. Tools say in words what they refuse, so these are words too.
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
from src.learning.metrics import SOLVED

NUM_REPEATS = 3  # of the same answer in a row, from which on a customer is stuck
LONG_ANSWER = 40  # characters, from which on an answer is no mere consent


class Pattern(StrEnum):
    ARGUMENTS = "argument_error"  # a call with arguments that the tool does not take
    AUTHORISATION = "authorisation"  # something that the rules, or the state of things, do not allow
    NOT_FOUND = "not_found"  # a call about what there is not, an unknown tool for one
    OTHER_ERROR = "other_tool_error"
    UNREADABLE = "unreadable_answer"  # a call that could not be parsed, or an empty answer
    CONTEXT_OVERFLOW = "context_overflow"
    LIMIT = "other_limit"  # turns, time, too many errors
    NOTHING_DONE = "nothing_done"  # it came to its end without a single call
    FALSE_COMPLETION = "false_completion"  # it came to its end as if all were well
    CUSTOMER = "customer_fault"  # the customer left its scenario, its role or its senses


# What an error says, the first that fits.
ERRORS = (
    (Pattern.UNREADABLE, r"could not be read|answer was empty"),
    (
        Pattern.AUTHORISATION,
        r"authori[sz]|permission|forbidden|denied|not allowed|cannot be|belong|eligible|insufficient",
    ),
    (Pattern.NOT_FOUND, r"not found|not exist|there is no|no such|unknown"),
    (
        Pattern.ARGUMENTS,
        r"argument|parameter|validation|invalid|missing|required|takes|expected|must|should|valid (string|number|integer)",
    ),
)


def patterns(trajectory: Trajectory) -> frozenset[Pattern]:
    """Those of a failed trial; none of one that was solved."""
    if trajectory.reward >= SOLVED:
        return frozenset()
    found = {pattern_of(text) for text in errors(trajectory.conversation)}
    metrics = trajectory.metrics
    if metrics.get("unusable_answers") or metrics.get("parse_failures"):
        found.add(Pattern.UNREADABLE)
    if customer_faults(trajectory):
        found.add(Pattern.CUSTOMER)
    if trajectory.stop_reason is StopReason.CONTEXT_LENGTH:
        found.add(Pattern.CONTEXT_OVERFLOW)
    elif trajectory.stop_reason in OVERLONG or metrics.get("too_many_errors"):
        found.add(Pattern.LIMIT)
    elif metrics.get("tool_calls") == 0:
        found.add(Pattern.NOTHING_DONE)
    elif Pattern.CUSTOMER not in found:
        found.add(Pattern.FALSE_COMPLETION)
    return frozenset(found)


def errors(conversation: Sequence[Mapping[str, object]]) -> list[str]:
    """What tools answered to calls that failed."""
    told = [str(message.get("content") or "") for message in conversation if message.get("role") == "tool"]
    return [text for text in told if text.startswith("Error")]


def pattern_of(error: str) -> Pattern:
    """
    >>> [str(pattern_of(text)) for text in ("Error: Order not found", "Error: Non-pending order cannot be cancelled", "Error: 7")]
    ['not_found', 'authorisation', 'other_tool_error']
    """
    return next(
        (pattern for pattern, words in ERRORS if re.search(words, error, re.IGNORECASE)), Pattern.OTHER_ERROR
    )


def customer_faults(trajectory: Trajectory) -> list[str]:
    """What a failed conversation's customer did that a customer does not do."""
    said = [
        str(message.get("content") or "")
        for message in trajectory.conversation[1:]
        if message.get("role") == "user"
    ]
    said = [
        text for text in said if not text.startswith("Error")
    ]  # the environment's, about an answer that nobody could hear
    found: list[str] = []
    if any(OUT_OF_SCOPE in text for text in said):
        found.append("left its scenario")
    if any("<tool_call>" in text or "<think>" in text for text in said):
        found.append("left its role")
    if is_stuck(trajectory.conversation):
        found.append("repeated itself")
    if trajectory.metrics.get("user_tool_errors"):
        found.append("could not use its own tools")
    return found


def is_stuck(conversation: Sequence[Mapping[str, object]]) -> bool:
    """Whether a customer gave one long answer to several different questions in a row; `Yes.` may well answer them all."""
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
        and len({asked for asked, _ in window}) == NUM_REPEATS
        for window in windows
    )


def pattern_counts(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many of the failed trials show each pattern; every pattern has its number."""
    counts = Counter(pattern for trajectory in trajectories for pattern in patterns(trajectory))
    return {str(pattern): counts[pattern] for pattern in Pattern}
