"""Tests the failure patterns of service trials. test_terminal_patterns.py tests those of terminal trials."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from src.core.trajectory import StopReason, Trajectory, ZeroReason
from src.envs.service.user_simulator import OUT_OF_SCOPE, STOP
from src.evaluate.failure_patterns import (
    Pattern,
    pattern_counts,
    pattern_of,
    patterns,
    result_patterns,
    user_simulator_faults,
)
from src.policy.tool_messages import with_described_tools

SYSTEM = {"role": "system", "content": "policy"}


def failed(*messages: tuple[str, str], stop: StopReason = StopReason.STOP, **metrics: Any) -> Trajectory:
    conversation: list[Mapping[str, object]] = [
        SYSTEM,
        *({"role": role, "content": content} for role, content in messages),
    ]
    return Trajectory(
        task_id="a",
        turns=[],
        reward=0.0,
        stop_reason=stop,
        conversation=conversation,
        metrics={"tool_calls": 1.0, "parse_attempts": 1.0, **metrics},
    )


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        ("Error: RetailTools.get_order_details() got an unexpected keyword argument 'x'", Pattern.ARGUMENTS),
        ("Error: get_order takes order, each a string", Pattern.ARGUMENTS),
        ("Error: Invalid reason", Pattern.ARGUMENTS),
        ("Error: The number of items to be exchanged should match.", Pattern.ARGUMENTS),
        ("Error: Non-pending order cannot be cancelled", Pattern.AUTHORISATION),
        ("Error: permission denied", Pattern.AUTHORISATION),
        ("Error: Order not found", Pattern.NOT_FOUND),
        ("Error: Tool 'fly' not found.", Pattern.NOT_FOUND),
        ("Error: there is no order kala", Pattern.NOT_FOUND),
        ("Error: the call could not be read: it is cut", Pattern.UNREADABLE),
        ("Error: 7", Pattern.OTHER_ERROR),
    ],
)
@pytest.mark.seed_behaviour(150)
def test_tool_refusals_are_recognised_by_their_text(error: str, pattern: Pattern):
    assert pattern_of(error) is pattern
    assert pattern in patterns(failed(("tool", error), stop=StopReason.MAX_TURNS))


def test_the_question_is_not_a_tool_result():
    """A trial of `env=data` has a system message and no user simulator."""
    messages = (("user", "Why?\nValueError: invalid argument"), ("assistant", "Because."))
    trajectory = failed(*messages)
    metrics = {name: value for name, value in trajectory.metrics.items() if name == "none"}
    assert patterns(replace(trajectory, metrics=metrics)) == {Pattern.FALSE_COMPLETION}


def test_a_tool_answer_that_mentions_errors_is_no_error():
    assert patterns(failed(("tool", '{"note": "Error: not found"}'))) == {Pattern.FALSE_COMPLETION}


@pytest.mark.parametrize(
    ("trajectory", "pattern"),
    [
        (failed(), Pattern.FALSE_COMPLETION),
        (failed(tool_calls=0.0), Pattern.NOTHING_DONE),
        (failed(stop=StopReason.CONTEXT_LENGTH), Pattern.CONTEXT_OVERFLOW),
        (failed(stop=StopReason.MAX_TURNS), Pattern.LIMIT),
        (failed(stop=StopReason.TIMEOUT), Pattern.LIMIT),
        (failed(stop=StopReason.SESSION_CLOSED), Pattern.FALSE_COMPLETION),  # the agent closed it
        (failed(too_many_errors=1.0), Pattern.LIMIT),
    ],
)
def test_the_end_of_a_failed_trial_has_a_pattern(trajectory: Trajectory, pattern: Pattern):
    assert patterns(trajectory) == {pattern}


def test_a_trial_whose_last_call_failed_is_no_false_completion():
    denied, done = ("tool", "Error: permission denied"), ("tool", "{}")
    assert patterns(failed(done, denied)) == {Pattern.AUTHORISATION}
    assert patterns(failed(denied, done)) == {Pattern.AUTHORISATION, Pattern.FALSE_COMPLETION}


@pytest.mark.parametrize(
    ("reason", "pattern"),
    [(ZeroReason.TIMEOUT, Pattern.LIMIT), (ZeroReason.SANDBOX_BROKEN, Pattern.GRADING_PREVENTED)],
)
def test_a_trial_without_a_grade_is_no_false_completion(reason: ZeroReason, pattern: Pattern):
    assert patterns(replace(failed(), zero_reason=reason)) == {pattern}


def test_a_solved_trial_has_no_pattern():
    solved = replace(failed(("tool", "Error: Order not found")), reward=1.0)
    assert patterns(solved) == frozenset() and sum(pattern_counts([solved]).values()) == 0


@pytest.mark.parametrize(
    ("messages", "metrics", "fault"),
    [
        ([f"I do not know. {OUT_OF_SCOPE}"], {}, "left its scenario"),
        (["<tool_call>{}</tool_call>"], {}, "left its role"),
        (["Please."], {"user_tool_errors": 1.0}, "could not use its own tools"),
    ],
)
def test_a_user_simulator_fault_is_no_false_completion(
    messages: list[str], metrics: dict[str, Any], fault: str
):
    trajectory = failed(*(("user", text) for text in messages), **metrics)
    assert user_simulator_faults(trajectory) == [fault]
    assert patterns(trajectory) == {Pattern.USER_SIMULATOR}


def test_a_fleet_task_is_no_message_of_a_user_simulator():
    task = {"role": "user", "content": "Which call is in <tool_call>{}</tool_call>?"}
    trial = replace(failed(), conversation=with_described_tools([task], []))
    assert user_simulator_faults(trial) == [] and patterns(trial) == {Pattern.FALSE_COMPLETION}


def conversation(questions: list[str], answers: list[str]) -> Trajectory:
    return failed(
        *(
            message
            for pair in zip(questions, answers, strict=True)
            for message in (("assistant", pair[0]), ("user", pair[1]))
        )
    )


def test_a_user_simulator_that_repeats_itself_is_a_fault():
    wish = "I would like to have my order number 17 sent to another address."
    assert user_simulator_faults(conversation(["Which?", "When?", "Where?"], [wish] * 3)) == [
        "repeated itself"
    ]
    assert (
        user_simulator_faults(conversation(["Which?", "When?", "Where?"], [wish, wish, f"{wish} {STOP}"]))
        == []
    )
    # The agent is stuck, not the user.
    assert user_simulator_faults(conversation(["I cannot help."] * 3, [wish] * 3)) == []
    assert (
        user_simulator_faults(conversation(["Shall I?", "Really?", "Now?"], ["Yes, please go ahead."] * 3))
        == []
    )
    assert user_simulator_faults(conversation(["", "", ""], ["Error: the answer was empty."] * 3)) == []


def test_patterns_are_counted_once_per_trial():
    twice = failed(("tool", "Error: Order not found"), ("tool", "Error: User not found"))
    counts = pattern_counts([twice, twice, failed()])
    assert (
        counts["not_found"] == 2 and counts["false_completion"] == 1 and counts["user_simulator_fault"] == 0
    )
    assert set(counts) == {str(pattern) for pattern in Pattern}


def test_a_long_tool_result_is_searched_in_linear_time():
    started = time.process_time()
    assert result_patterns("@" * 50_000) == set()
    assert result_patterns("me@host@host:~$ no such file") == set()
    assert time.process_time() - started < 1
