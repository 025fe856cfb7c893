"""Runs whole Harbor trials in real sandboxes with a scripted policy, for every way in which a trial ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import BackendError, ConfigError
from src.core.trajectory import FailureKind, StopReason, Trajectory, TrialFailure, Turn, ZeroReason
from src.envs.harbor.agent import TrainingTerminus2
from src.envs.harbor.timed_policy import TimedPolicy
from src.policy.sampling_policy import SampleRequest
from src.records.dumps import conversation
from tests.fakes.harbor_trials import (
    SOLUTION,
    TASKS,
    harbor_tasks,
    in_sandbox,
    remaining_files,
    run_trial,
    variant,
)
from tests.fakes.scripted_policy import ScriptedPolicy, answer, solving
from tests.fakes.tokenizer import byte_chat

pytestmark = in_sandbox

SUMMARIZING = {"context_limit": 7500, "enable_summarize": True, "proactive_summarization_threshold": 0}
# Two turns fit into the context. For the third prompt, Harbor lets three sub-agents summarize.
SUMMARIZED_SCRIPT = {
    "Here are the answers": [answer(done=True)] * 3,
    "": [answer("echo hello > /app/hello.txt"), answer("seq 2000", duration=0.5)],
}


async def test_a_solved_task_has_reward_1_and_exact_tokens(tmp_path: Path) -> None:
    outcome, policy = await run_trial(tmp_path, SOLUTION)
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.STOP, 3)
    assert [turn.prompt_ids for turn in outcome.turns] == policy.prompts
    for earlier, later in zip(outcome.turns, outcome.turns[1:], strict=False):
        ids = [*earlier.prompt_ids, *earlier.completion_ids]
        assert list(later.prompt_ids[: len(ids)]) == ids
    assert outcome.metrics["prefix_breaks"] == 0
    assert outcome.metrics["duration_s"] > 0
    messages: Any = conversation(outcome, lambda ids, clean: "")
    answers = [message for message in messages if "tool_calls" in message]
    calls = [call["function"] for message in answers for call in message["tool_calls"]]
    assert [call["name"] for call in calls] == ["bash_command", "mark_task_complete", "mark_task_complete"]
    assert calls[0]["arguments"]["keystrokes"] == "echo hello > /app/hello.txt\n"
    assert answers[0]["content"] == "Analysis: a\nPlan: p"
    directory = tmp_path / "jobs" / outcome.trial_name
    result = (directory / "result.json").read_text()
    assert json.loads(result)["verifier_result"]["rewards"] == {"reward": 1.0}
    assert len(result) < 20_000, "Harbor's result must not contain token ids"
    assert (directory / "agent" / "trajectory.json").is_file() and (directory / "trial.log").is_file()


async def test_a_wrong_solution_is_graded_0(tmp_path: Path) -> None:
    outcome, _ = await run_trial(tmp_path, solving("echo goodbye > /app/hello.txt"))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (0.0, StopReason.STOP)


@pytest.mark.parametrize(
    "commands",
    ["[" * 3000 + "]" * 3000, "1" * 5000, f'[{{"keystrokes": "x", "duration": 1{"0" * 400}}}]'],
    ids=["nested", "many digits", "long duration"],
)
async def test_an_answer_with_extreme_json_is_a_parse_failure(tmp_path: Path, commands: str) -> None:
    extreme = f'{{"analysis": "", "plan": "", "commands": {commands}}}'
    tasks = harbor_tasks(max_tokens=10_000, context_limit=100_000)
    outcome, _ = await run_trial(tmp_path, [extreme, answer(done=True), answer(done=True)], tasks)
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.zero_reason) == (0.0, None)
    assert outcome.metrics["parse_failures"] == 1


async def test_a_trial_that_reaches_max_turns_is_graded(tmp_path: Path) -> None:
    script = [answer("echo hello > /app/hello.txt"), answer("true", duration=0.1)]
    outcome, _ = await run_trial(tmp_path, script, harbor_tasks(max_turns=3))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.MAX_TURNS, 3)


async def test_an_unconfirmed_completion_in_the_last_turn_is_max_turns(tmp_path: Path) -> None:
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(max_turns=2))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.MAX_TURNS)


async def test_consecutive_cut_answers_end_the_episode(tmp_path: Path) -> None:
    outcome, _ = await run_trial(
        tmp_path, [SOLUTION[0], "word " * 1000], harbor_tasks(max_tokens=200, max_consecutive_truncations=2)
    )
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.LENGTH)
    assert [(turn.stop_reason, len(turn.completion_ids)) for turn in outcome.turns[1:]] == [
        (StopReason.LENGTH, 200)
    ] * 2


async def test_a_full_context_is_graded(tmp_path: Path) -> None:
    script = [answer("echo hello > /app/hello.txt"), answer("seq 1000", duration=0.5)]
    outcome, _ = await run_trial(tmp_path, script, harbor_tasks(context_limit=5000))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, outcome.metrics["prefix_breaks"]) == (
        1.0,
        StopReason.CONTEXT_LENGTH,
        0,
    )


async def test_a_summary_breaks_the_prefix_and_is_not_trained(tmp_path: Path) -> None:
    outcome, _ = await run_trial(tmp_path, SUMMARIZED_SCRIPT, harbor_tasks(**SUMMARIZING))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)
    assert outcome.metrics["prefix_breaks"] == 1
    assert outcome.metrics["subagent_turns"] == 3
    breaks = [
        later.prompt_ids[: len(earlier.prompt_ids)] != earlier.prompt_ids
        for earlier, later in zip(outcome.turns, outcome.turns[1:], strict=False)
    ]
    assert breaks == [False, True, False]


async def test_train_subagents_trains_summaries(tmp_path: Path) -> None:
    outcome, policy = await run_trial(
        tmp_path, SUMMARIZED_SCRIPT, harbor_tasks(**SUMMARIZING, train_subagents="all")
    )
    assert isinstance(outcome, Trajectory)
    assert [turn.prompt_ids for turn in outcome.turns] == policy.prompts
    assert outcome.metrics["subagent_turns"] == 3 and len(outcome.turns) == 7


async def test_the_agents_time_limit_is_graded(tmp_path: Path) -> None:
    directory = variant(tmp_path, task_toml="[agent]\ntimeout_sec = 6\n")
    outcome, _ = await run_trial(
        tmp_path, [SOLUTION[0], answer("sleep 50", duration=50)], harbor_tasks(directory)
    )
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.AGENT_TIMEOUT, 2)


async def test_multipliers_extend_the_time_limits_of_a_task(tmp_path: Path) -> None:
    limits = "[agent]\ntimeout_sec = 0.1\n[verifier]\ntimeout_sec = 0.1\n"
    test = "sleep 0.5; echo 1 > /logs/verifier/reward.txt"
    tasks = harbor_tasks(
        variant(tmp_path, test=test, task_toml=limits),
        agent_timeout_multiplier=600,
        verifier_timeout_multiplier=600,
    )
    outcome, _ = await run_trial(tmp_path, SOLUTION, tasks)
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)


@pytest.mark.parametrize("command", ["exit", "tmux kill-server", "kill -9 -1"])
async def test_closing_the_terminal_is_graded(tmp_path: Path, command: str) -> None:
    outcome, _ = await run_trial(tmp_path, [SOLUTION[0], answer(command, duration=0.5)])
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.SESSION_CLOSED, 2)


async def test_emptying_tmp_does_not_close_the_terminal(tmp_path: Path) -> None:
    outcome, _ = await run_trial(tmp_path, solving("rm -rf /tmp/* /tmp/.[!.]*; echo hello > /app/hello.txt"))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)


async def test_a_broken_machine_has_reward_0(tmp_path: Path) -> None:
    script = [
        answer("echo hello > /app/hello.txt; rm -rf --no-preserve-root / 2>/dev/null", duration=3),
        answer("ls"),
    ]
    outcome, _ = await run_trial(tmp_path, script)
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (0.0, StopReason.SESSION_CLOSED)


@pytest.mark.parametrize(
    "command",
    [
        "cat /dev/zero > /app/big",
        "rm -rf /logs; echo x > /logs",
        "chmod 000 /logs",
        "rm -rf /tests; chmod 555 /",
    ],
)
async def test_a_machine_that_cannot_be_graded_has_reward_0(tmp_path: Path, command: str) -> None:
    outcome, _ = await run_trial(
        tmp_path, solving(command), harbor_tasks(environment_kwargs=["storage_mb=64"])
    )
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0


async def test_a_terminal_closed_within_a_turn_is_graded(tmp_path: Path) -> None:
    # Harbor raises a RuntimeError for the second command of the answer, because the terminal is closed.
    outcome, _ = await run_trial(
        tmp_path, [answer("echo hello > /app/hello.txt; tmux kill-server", "ls", duration=0.7)]
    )
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.SESSION_CLOSED)


async def test_a_backend_error_is_a_failure(tmp_path: Path) -> None:
    outcome, policy = await run_trial(tmp_path, [SOLUTION[0], BackendError("sampling: connection refused")])
    assert outcome == TrialFailure(
        task_id="hello-file",
        kind=FailureKind.BACKEND,
        message="sampling: connection refused",
        trial_name=outcome.trial_name,
    )
    assert len(policy.prompts) == 2, "the SDK retries, not the trial"
    result = json.loads((tmp_path / "jobs" / outcome.trial_name / "result.json").read_text())
    assert (result["exception_info"]["exception_type"], result["verifier"]) == ("BackendError", None)


async def test_an_unexpected_error_of_the_agent_is_not_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingTerminus2, "_normal_stop_reason", lambda _: 1 / 0)
    outcome, _ = await run_trial(tmp_path, SOLUTION)
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.zero_reason) == (0.0, ZeroReason.AGENT_ERROR)
    assert outcome.zero_detail == "ZeroDivisionError: division by zero"


class UnansweredPolicy(ScriptedPolicy):
    """A policy that answers `num_answered` calls. Later calls never return, like calls of the SDK to a lost
    server.
    """

    num_answered = 0

    async def sample(self, request: SampleRequest) -> Turn:
        if len(self.prompts) == self.num_answered:
            await asyncio.Event().wait()
        return await super().sample(request)


@pytest.mark.parametrize("num_answered", [0, 1])
async def test_a_time_limit_reached_on_a_lost_server_is_a_failure(
    tmp_path: Path, num_answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.envs.harbor.timed_policy.PROBE_TIMEOUT_S", 1)
    tasks = harbor_tasks(variant(tmp_path, task_toml="[agent]\ntimeout_sec = 6\n"))
    policy = UnansweredPolicy(byte_chat(), {"": [answer("true", duration=0.1)]})
    policy.num_answered = num_answered
    trial = tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0)
    outcome = await trial.run(policy)
    assert isinstance(outcome, TrialFailure), outcome
    assert outcome.kind is FailureKind.BACKEND
    assert outcome.message.startswith("the agent reached its time limit after it waited ")


async def test_a_call_in_progress_is_not_time_of_the_agent() -> None:
    policy = UnansweredPolicy(byte_chat(), {"": [answer("true", duration=0.1)]})
    policy.num_answered = 1
    timed = TimedPolicy(policy)
    request = SampleRequest(prompt_ids=[1], max_tokens=100, temperature=1.0)
    await timed.sample(request)
    hanging = asyncio.create_task(timed.sample(request))
    await asyncio.sleep(0.05)
    assert not timed.agent_used_most(time.monotonic() + 100)
    hanging.cancel()
    await asyncio.wait({hanging})
    assert timed.agent_used_most(time.monotonic() + 100)


async def test_a_backend_error_in_a_summary_is_a_failure(tmp_path: Path) -> None:
    error = BackendError("sampling: gone")
    script = {"You are about to hand off": [error], "": [answer("true"), answer("seq 2000", duration=0.5)]}
    outcome, _ = await run_trial(tmp_path, script, harbor_tasks(**SUMMARIZING))
    assert isinstance(outcome, TrialFailure) and outcome.kind == FailureKind.BACKEND


async def test_a_verifier_without_a_reward_is_a_failure(tmp_path: Path) -> None:
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(variant(tmp_path, test="true")))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.VERIFIER and "No reward file found" in outcome.message


async def test_a_verifier_that_never_ends_is_a_failure(tmp_path: Path) -> None:
    directory = variant(tmp_path, test="sleep 100", task_toml="[verifier]\ntimeout_sec = 0.5\n")
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(directory))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.VERIFIER and "timed out after 0.5 seconds" in outcome.message


async def test_a_reward_file_of_the_agent_is_ignored(tmp_path: Path) -> None:
    directory = "/logs/verifier"
    text, json_file = f"{directory}/reward.txt", f"{directory}/reward.json"
    one_write = f"mkdir -p {directory} /tests; echo 1 > {text}; echo '{{\"reward\": 1}}' > {json_file}"
    repeated_writes = f"(while true; do echo 1 > {text}; sleep 0.01; done) >/dev/null 2>&1 &"
    outcome, _ = await run_trial(tmp_path, solving(one_write, repeated_writes))
    assert isinstance(outcome, Trajectory)
    assert outcome.reward == 0.0


async def test_files_of_the_agent_in_tests_are_removed(tmp_path: Path) -> None:
    directory = variant(tmp_path, test="[ -e /tests/planted ]; echo $? > /logs/verifier/reward.txt")
    outcome, _ = await run_trial(
        tmp_path, solving("mkdir -p /tests; touch /tests/planted"), harbor_tasks(directory)
    )
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 1.0


async def test_test_files_that_harborignore_names_are_not_uploaded(tmp_path: Path) -> None:
    directory = variant(
        tmp_path, test="[ -e /tests/kept ] && [ ! -e /tests/notes.md ] && echo 1 > /logs/verifier/reward.txt"
    )
    for name, text in (("kept", ""), ("notes.md", ""), (".harborignore", "*.md\n")):
        (directory / "tests" / name).write_text(text)
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(directory))
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 1.0


async def test_a_verifier_can_have_a_sandbox_of_its_own(tmp_path: Path) -> None:
    directory = variant(
        tmp_path, task_toml='artifacts = ["/app/hello.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    )
    (directory / "tests" / "Dockerfile").write_text("FROM debian\nRUN mkdir /app\nCOPY . /tests\n")
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(directory))
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)


@pytest.mark.parametrize("is_on_host", [True, False])
async def test_tests_in_the_image_of_a_verifier_are_kept(tmp_path: Path, is_on_host: bool) -> None:
    directory = variant(
        tmp_path,
        test="echo 0 > /logs/verifier/reward.txt",
        task_toml='artifacts = ["/app/hello.txt"]\n[verifier]\nenvironment_mode = "separate"\n',
    )
    (directory / "tests" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /app\n"
        "RUN mkdir /tests && echo 'cp hello.txt /logs/verifier && echo 0.5 > /logs/verifier/reward.txt' "
        "> /tests/test.sh\n"
    )
    if not is_on_host:
        (directory / "tests" / "test.sh").unlink()
    outcome, _ = await run_trial(tmp_path, SOLUTION, harbor_tasks(directory))
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 0.5


def test_the_dockerfile_of_a_verifier_is_checked(tmp_path: Path) -> None:
    directory = variant(tmp_path, task_toml='[verifier]\nenvironment_mode = "separate"\n')
    (directory / "tests" / "Dockerfile").write_text("FROM debian\nRUN pip install pytest\n")
    message = "tests/Dockerfile:2: the sandbox cannot reach the network for `pip install`"
    with pytest.raises(ConfigError, match=message):
        harbor_tasks(directory)


async def test_a_debian_image_needs_no_dockerfile(tmp_path: Path) -> None:
    directory = variant(
        tmp_path,
        task_toml='[environment]\ndocker_image = "debian:12-slim"\nworkdir = "/srv"\ncpus = 0.5\n',
    )
    (directory / "environment" / "Dockerfile").unlink()
    (directory / "environment" / "word.txt").write_text("hello\n")
    outcome, _ = await run_trial(
        tmp_path, solving("mkdir /app && cp /srv/word.txt /app/hello.txt"), harbor_tasks(directory)
    )
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 1.0


def test_another_image_is_refused(tmp_path: Path) -> None:
    directory = variant(tmp_path, task_toml='[environment]\ndocker_image = "postgres:16"\n')
    (directory / "environment" / "Dockerfile").unlink()
    message = "the sandbox cannot replace the image postgres:16; use environment_type=docker"
    with pytest.raises(ConfigError, match=message):
        harbor_tasks(directory)


async def test_a_sandbox_that_cannot_be_built_is_a_failure(tmp_path: Path) -> None:
    outcome, policy = await run_trial(
        tmp_path, SOLUTION, harbor_tasks(variant(tmp_path, dockerfile="FROM a\nRUN touch /usr/bin/x\n"))
    )
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.SANDBOX and "environment_type=docker" in outcome.message
    assert policy.prompts == []


async def test_cancelling_a_trial_frees_the_sandbox(tmp_path: Path) -> None:
    tasks = harbor_tasks()
    policy = ScriptedPolicy(byte_chat(), {"": [answer("sleep 60", duration=60)]})
    trial = asyncio.create_task(
        tasks.trial(tasks.train[0], directory=tmp_path, seed=1, temperature=1.0).run(policy)
    )
    async with asyncio.timeout(60):
        await policy.is_sampling.wait()
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert remaining_files(tasks) == {"lock", "skeleton"}


async def test_sixteen_trials_run_at_once(tmp_path: Path) -> None:
    tasks = harbor_tasks(TASKS)
    scripts = {
        "hello.txt": SOLUTION,
        "count.txt": solving("find data -type f -exec cat {} + | wc -l > count.txt"),
    }
    policy = ScriptedPolicy(byte_chat(), scripts)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as group:
        trials = [
            group.create_task(tasks.trial(task, directory=tmp_path, seed=index, temperature=1.0).run(policy))
            for index in range(8)
            for task in tasks.train
        ]
    outcomes = [trial.result() for trial in trials]
    assert len(outcomes) == 16
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Trajectory)] == [1.0] * 16
    assert len({outcome.trial_name for outcome in outcomes}) == 16
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert remaining_files(tasks) == {"lock", "skeleton"}


class RecordedNames(logging.Handler):
    """Records the names of the loggers whose records reach the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


async def test_harbor_writes_nothing_to_our_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recorded = RecordedNames()
    logging.getLogger().addHandler(recorded)
    try:
        await run_trial(tmp_path, SOLUTION)
    finally:
        logging.getLogger().removeHandler(recorded)
    assert [name for name in recorded.names if name.startswith(("harbor", "LiteLLM"))] == []
    assert capfd.readouterr().err == ""
