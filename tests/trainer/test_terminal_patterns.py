"""Tests the failure patterns of terminal agents in real Harbor trials with a scripted policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from src.analyze.run_files import dumped_trial
from src.core.trajectory import StopReason, Trajectory
from src.evaluate.failure_patterns import Pattern, patterns, tool_results, user_simulator_faults
from src.records.dumps import eval_record
from tests.fakes.harbor_trials import harbor_tasks, in_sandbox, run_trial
from tests.fakes.scripted_policy import answer
from tests.fakes.trials import task

pytestmark = in_sandbox
DONE = [answer(done=True)] * 2
WRONG = "echo goodbye > /app/hello.txt"
DENIED = "touch run; ./run"
FALSE_COMPLETION = Pattern.FALSE_COMPLETION
SCRIPTS = {
    "a wrong result": ([answer(WRONG), *DONE], {FALSE_COMPLETION}),
    "no command": (DONE, {Pattern.NOTHING_DONE}),
    "denied at the end": ([answer(WRONG), answer(DENIED), *DONE], {Pattern.AUTHORISATION}),
    "denied at first": ([answer(DENIED), answer(WRONG), *DONE], {Pattern.AUTHORISATION, FALSE_COMPLETION}),
    "no such file": ([answer("cat nothing.txt"), *DONE], {Pattern.NOT_FOUND}),
    "no such command": ([answer("frobnicate --all"), *DONE], {Pattern.NOT_FOUND}),
    "an unknown option": ([answer("ls --no-such-option"), *DONE], {Pattern.ARGUMENTS}),
    "usage": ([answer("grep"), *DONE], {Pattern.ARGUMENTS}),
    "an exception": ([answer("python3 -c 1/0", duration=2), *DONE], {Pattern.OTHER_ERROR}),
    "an echo of an error": ([answer("clear; echo Permission denied"), *DONE], {FALSE_COMPLETION}),
    "unreadable answers": (
        ["I begin.", "I go on.", '{"commands": ', answer(WRONG), *DONE],
        {Pattern.UNREADABLE, FALSE_COMPLETION},
    ),
}


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.seed_behaviour(150)
async def test_a_failed_terminal_trial_has_its_patterns(
    tmp_path: Path, script: Sequence[str], expected: set[Pattern]
) -> None:
    trial, _ = await run_trial(tmp_path, script)
    assert isinstance(trial, Trajectory) and trial.reward == 0
    assert patterns(trial) == expected, tool_results(trial)
    assert user_simulator_faults(trial) == []
    record = eval_record(task(trial.task_id), trial, lambda ids, clean: "", env_class="harbor")
    read_again = dumped_trial(json.loads(json.dumps(record)), "hello")
    assert patterns(read_again.trajectory) == expected
    assert read_again.num_tool_calls == trial.metrics["tool_calls"]


async def test_a_terminal_trial_out_of_turns_reached_a_limit(tmp_path: Path) -> None:
    trial, _ = await run_trial(tmp_path, [answer(WRONG)], harbor_tasks(max_turns=2))
    assert isinstance(trial, Trajectory) and trial.stop_reason is StopReason.MAX_TURNS
    assert patterns(trial) == {Pattern.LIMIT}
