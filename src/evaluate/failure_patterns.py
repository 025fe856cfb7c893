"""Failure patterns of trials and faults of the user simulator, recognized from the trajectory.

A failed trial can show several patterns, each at most once. Tools report errors as text, so the patterns of
errors are recognized by words in this text. An error is a tool result that starts with `Error`, or a line of
a result that has the form of a program's error message. The tool results are

    service domains, env=fleet    messages of role `tool`
    other environments            messages of role `user` or `tool` after the first answer, which are the
                                  output of a terminal or of an environment, without Terminus-2's replies to
                                  unparsable answers

A service domain is a domain with tools, a database and a user simulator, such as those of tau-bench. A trial
of a service domain or of env=fleet is recognized by the metric `parse_attempts`, the number of answers with a
tool call. Only trials of service domains have a user simulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

from src.core.trajectory import StopReason, Trajectory, ZeroReason
from src.envs.service.user_simulator import OUT_OF_SCOPE
from src.learning.filters import OVERLONG
from src.learning.rollout_groups import SOLVED
from src.policy.tool_messages import TOOLS_INTRODUCTION

NUM_REPEATS = 3  # a user simulator that gives the same answer this often in a row is stuck
LONG_ANSWER = 40  # characters; shorter answers, such as a consent, may be repeated


class Pattern(StrEnum):
    ARGUMENTS = "argument_error"  # a call with invalid arguments
    AUTHORISATION = "authorisation"  # an action that the rules or the state of the database forbid
    NOT_FOUND = "not_found"  # a call about an object that does not exist, or of an unknown tool
    OTHER_ERROR = "other_tool_error"
    UNREADABLE = "unreadable_answer"  # a call that could not be parsed, or an empty answer
    CONTEXT_OVERFLOW = "context_overflow"
    LIMIT = "other_limit"  # a limit of turns, time, answer length or errors
    NOTHING_DONE = "nothing_done"  # the trial ended without a tool call
    GRADING_PREVENTED = "grading_prevented"  # a `ZeroReason` other than TIMEOUT, and no limit was reached
    # None of CONTEXT_OVERFLOW, LIMIT, NOTHING_DONE, GRADING_PREVENTED and USER_SIMULATOR applies, and the
    # last call did not fail.
    FALSE_COMPLETION = "false_completion"
    USER_SIMULATOR = "user_simulator_fault"  # a fault that `user_simulator_faults` returns


# An error has the pattern of the first entry whose expression matches the text of the error.
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
# The same kind of table, for lines of terminal output that have the form of an error message.
TERMINAL_ERRORS = (
    (
        Pattern.AUTHORISATION,
        r"permission denied|not permitted|access denied|read-only file system|must be root|are you root",
    ),
    (
        Pattern.NOT_FOUND,
        r"no such|not found|not exist|cannot find|unable to locate|no module named|could not resolve",
    ),
    (
        Pattern.ARGUMENTS,
        r"(unrecognized|invalid|unknown|illegal|unexpected|missing) (option|argument|operand|token|command)"
        r"|requires an argument|too (many|few) arguments|syntax error|usage:",
    ),
    (Pattern.OTHER_ERROR, r"^\w*(error|exception|fatal|e): |: (error|fatal): |: \*\*\* "),
)
# Matches lines such as `cat: x: Permission denied`, `ValueError: ...` and `usage: ...`. A line that starts
# with a shell prompt (`user@host:`) shows a command and is not an error.
# The expression takes linear time: [^\s@]* matches only the text before the first @.
ERROR_LINE = re.compile(r"^(?![^\s@]*@\S*:)[\w./+-]+:\s")
PARSE_ERROR = "Previous response had parsing errors"  # in Terminus-2's reply to an unparsable answer
COMPLETE = "mark_task_complete"  # a call that changes nothing in the environment


def patterns(trajectory: Trajectory) -> frozenset[Pattern]:
    """Return the patterns of a failed trial; none for a solved trial."""
    if trajectory.reward >= SOLVED:
        return frozenset()
    results = tool_results(trajectory)
    matching = {pattern for text in results for pattern in result_patterns(text)}
    metrics = trajectory.metrics
    if metrics.get("unusable_answers") or metrics.get("parse_failures"):
        matching.add(Pattern.UNREADABLE)
    if user_simulator_faults(trajectory):
        matching.add(Pattern.USER_SIMULATOR)
    if trajectory.stop_reason is StopReason.CONTEXT_LENGTH:
        matching.add(Pattern.CONTEXT_OVERFLOW)
    elif (
        trajectory.stop_reason in OVERLONG
        or trajectory.zero_reason is ZeroReason.TIMEOUT
        or metrics.get("too_many_errors")
    ):
        matching.add(Pattern.LIMIT)
    elif trajectory.zero_reason is not None:
        matching.add(Pattern.GRADING_PREVENTED)
    elif metrics.get("tool_calls") == 0:
        matching.add(Pattern.NOTHING_DONE)
    elif Pattern.USER_SIMULATOR not in matching and not (results and result_patterns(results[-1])):
        matching.add(Pattern.FALSE_COMPLETION)
    return frozenset(matching)


def has_tool_messages(trajectory: Trajectory) -> bool:
    """Return whether the trial is one of a service domain or of env=fleet."""
    return "parse_attempts" in trajectory.metrics


def tool_results(trajectory: Trajectory) -> list[str]:
    """Return the results of the calls, in their order.

    If an answer has no commands, the terminal output after it is added to the previous result.
    """
    if has_tool_messages(trajectory):
        messages = [message for message in trajectory.conversation if message.get("role") == "tool"]
        return [_text(message) for message in messages]
    results: list[str] = []
    has_called: bool | None = None  # None: no answer precedes
    for index, message in enumerate(trajectory.conversation):
        if message.get("role") == "assistant":
            has_called = _calls({**message, **trajectory.tool_fields.get(index, {})})
        elif has_called is None:  # the system message or the question
            continue
        elif message.get("role") in ("user", "tool") and PARSE_ERROR not in _text(message):
            if has_called or not results:
                results.append(_text(message))
            else:
                results[-1] += "\n" + _text(message)
    return results


def result_patterns(result: str) -> set[Pattern]:
    """Return the patterns of the errors in a tool result.

    >>> [str(pattern) for pattern in result_patterns("root@host:/# ./run\\nbash: ./run: Permission denied")]
    ['authorisation']
    >>> result_patterns('{"note": "Error: not found"}')
    set()
    """
    if result.startswith("Error"):
        return {pattern_of(result)}
    lines = [line for line in result.splitlines() if ERROR_LINE.match(line)]
    return {pattern for line in lines if (pattern := _first_match(line, TERMINAL_ERRORS)) is not None}


def pattern_of(error: str) -> Pattern:
    """Return the pattern of one error.

    >>> texts = ("Error: Order not found", "Error: Non-pending order cannot be cancelled", "Error: 7")
    >>> [str(pattern_of(text)) for text in texts]
    ['not_found', 'authorisation', 'other_tool_error']
    """
    return _first_match(error, ERRORS) or Pattern.OTHER_ERROR


def has_user_simulator(trajectory: Trajectory) -> bool:
    """Return whether the trial is one of a service domain, whose conversation starts with a system message
    that contains the domain's rules (in tau-bench, the policy). A conversation of env=fleet starts with the
    task, or with a description of the tools.
    """
    first = trajectory.conversation[0] if trajectory.conversation else {}
    starts_with_policy = first.get("role") == "system" and not _text(first).startswith(TOOLS_INTRODUCTION)
    return has_tool_messages(trajectory) and starts_with_policy


def user_simulator_faults(trajectory: Trajectory) -> list[str]:
    """Return the faults of the user simulator in a trial, in words; none without a user simulator."""
    if not has_user_simulator(trajectory):
        return []
    messages = [_text(message) for message in trajectory.conversation[1:] if message.get("role") == "user"]
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


def _calls(message: Mapping[str, Any]) -> bool:
    """Return whether an answer calls a tool other than COMPLETE; True if its calls were not recorded."""
    if "tool_calls" not in message:
        return True
    return any(call["function"]["name"] != COMPLETE for call in message["tool_calls"])


def _first_match(text: str, table: Sequence[tuple[Pattern, str]]) -> Pattern | None:
    return next((pattern for pattern, words in table if re.search(words, text, re.IGNORECASE)), None)


def _text(message: Mapping[str, object]) -> str:
    return str(message.get("content") or "")
