"""Whole Harbor trials in real sandboxes, played by a script: every way a trial can end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from src.config import TrainerConfig
from src.core.errors import BackendError, ConfigError
from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrialFailure, Turn
from src.envs.harbor.environment import (
    HarborTasks,
    environment_options,
    open_harbor,
    resolve_environment_type,
)
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.run_directory import run_directory
from src.envs.validate import main as validate
from src.policy.sampling_policy import SampleRequest
from tests.fakes.scripted_policy import ScriptedPolicy, answer, solving
from tests.fakes.tokenizer import byte_chat

REASON = why_no_sandbox()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no sandbox here: {REASON}")

TASKS = Path(__file__).resolve().parents[1] / "tasks"
HELLO = TASKS / "hello-file"
SOLUTION = solving("echo hello > /app/hello.txt")
SUMMARISING = {"context_limit": 7500, "enable_summarize": True, "proactive_summarization_threshold": 0}
SUMMARISED = [answer(done=True)] * 3


def source(tasks_dir: Path = HELLO, **options: object) -> HarborTasks:
    defaults = {"environment_type": "sandbox", "max_turns": 8, "enable_summarize": False, "eval_split": 0.0}
    return open_harbor(
        TrainerConfig(model_name="org/model", tasks_dir=str(tasks_dir), **{**defaults, **options}),
        byte_chat(),
    )


def left_by(tasks: HarborTasks) -> set[str]:
    """What lies in the run's directory."""
    return {path.name for path in run_directory(tasks.run_label).iterdir()}


async def play(
    tmp_path: Path,
    script: Sequence[str | BaseException] | Mapping[str, Sequence[str | BaseException]],
    tasks: HarborTasks | None = None,
) -> tuple[Trajectory | TrialFailure, ScriptedPolicy]:
    tasks = tasks or source()
    policy = ScriptedPolicy(byte_chat(), script if isinstance(script, Mapping) else {"": script})
    outcome = await tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0).run(
        policy
    )
    # Nothing of a finished trial stays: only the lock and the shared files are left in the run's directory.
    assert left_by(tasks) <= {"lock", "skeleton", "labels.yaml"}
    return outcome, policy


def variant(
    tmp_path: Path, *, test: str | None = None, task_toml: str | None = None, dockerfile: str | None = None
) -> Path:
    """The hello task with another verifier, configuration or image."""
    folder = tmp_path / "tasks" / "variant"
    shutil.copytree(HELLO, folder)
    if test is not None:
        (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    if task_toml is not None:
        (folder / "task.toml").write_text(task_toml)
    if dockerfile is not None:
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return folder


async def test_solving_the_task_is_graded_1_with_the_exact_tokens(tmp_path: Path) -> None:
    outcome, policy = await play(tmp_path, SOLUTION)
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.STOP, 3)
    assert [turn.prompt_ids for turn in outcome.turns] == policy.prompts
    for earlier, later in zip(outcome.turns, outcome.turns[1:], strict=False):
        both = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(both)] == both
    assert outcome.metrics["prefix_breaks"] == 0
    assert outcome.metrics["duration_s"] > 0
    folder = tmp_path / "jobs" / outcome.trial_name
    result = (folder / "result.json").read_text()
    assert json.loads(result)["verifier_result"]["rewards"] == {"reward": 1.0}
    assert len(result) < 20_000, "token ids belong to the recorder, not into Harbor's result"
    assert (folder / "agent" / "trajectory.json").is_file() and (folder / "trial.log").is_file()


async def test_a_folder_of_trials_is_a_job_with_totals_for_harbors_viewer(tmp_path: Path) -> None:
    from harbor.viewer.scanner import JobScanner

    tasks, jobs = source(), tmp_path / "jobs"
    (jobs / "step_000001").mkdir(parents=True)
    tasks.batch_ended(jobs / "step_000001")
    assert not any((jobs / "step_000001").iterdir()), "nothing to sum up"
    for script in (SOLUTION, solving("true"), [BackendError("sampling: gone")]):
        policy = ScriptedPolicy(byte_chat(), {"": script})
        await tasks.trial(tasks.train[0], directory=jobs / "step_000001", seed=1, temperature=1.0).run(policy)
    (jobs / "step_000001" / "killed").mkdir()
    tasks.batch_ended(jobs / "step_000001")
    viewer = JobScanner(jobs)
    config, result = viewer.get_job_config("step_000001"), viewer.get_job_result("step_000001")
    assert config is not None and result is not None
    assert config.job_name == "step_000001" and [task.path for task in config.tasks] == [HELLO]
    assert (result.n_total_trials, result.stats.n_completed_trials, result.stats.n_errored_trials) == (
        3,
        3,
        1,
    )
    [stats] = result.stats.evals.values()
    assert {reward: len(names) for reward, names in stats.reward_stats["reward"].items()} == {1.0: 1, 0.0: 1}
    assert list(stats.exception_stats) == ["BackendError"]
    assert len(viewer.list_trials("step_000001")) == 3


async def test_a_wrong_solution_is_graded_0(tmp_path: Path) -> None:
    outcome, _ = await play(tmp_path, solving("echo goodbye > /app/hello.txt"))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (0.0, StopReason.STOP)


async def test_running_out_of_turns_is_graded(tmp_path: Path) -> None:
    script = [answer("echo hello > /app/hello.txt"), answer("true", duration=0.1)]
    outcome, _ = await play(tmp_path, script, source(max_turns=3))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.MAX_TURNS, 3)


async def test_a_completion_awaiting_confirmation_in_the_last_turn_is_not_a_clean_stop(
    tmp_path: Path,
) -> None:
    outcome, _ = await play(tmp_path, SOLUTION, source(max_turns=2))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.MAX_TURNS)


async def test_cut_answers_are_kept_and_end_the_episode_when_they_go_on(tmp_path: Path) -> None:
    outcome, _ = await play(
        tmp_path, [SOLUTION[0], "word " * 1000], source(max_tokens=200, max_consecutive_truncations=2)
    )
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.LENGTH)
    assert [(turn.stop_reason, len(turn.completion_ids)) for turn in outcome.turns[1:]] == [
        (StopReason.LENGTH, 200)
    ] * 2


async def test_a_full_context_is_graded(tmp_path: Path) -> None:
    script = [answer("echo hello > /app/hello.txt"), answer("seq 1000", duration=0.5)]
    outcome, _ = await play(tmp_path, script, source(context_limit=5000))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, outcome.metrics["prefix_breaks"]) == (
        1.0,
        StopReason.CONTEXT_LENGTH,
        0,
    )


async def test_a_summary_starts_a_new_prefix_and_is_recorded_apart(tmp_path: Path) -> None:
    # Two turns fit; the third prompt does not, and Harbor has three sub-agents summarise.
    script = {
        "Here are the answers": SUMMARISED,
        "": [answer("echo hello > /app/hello.txt"), answer("seq 2000", duration=0.5)],
    }
    outcome, _ = await play(tmp_path, script, source(**SUMMARISING))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)
    assert outcome.metrics["prefix_breaks"] == 1
    assert outcome.metrics["subagent_turns"] == 3
    breaks = [
        later.prompt_ids[: len(earlier.prompt_ids)] != earlier.prompt_ids
        for earlier, later in zip(outcome.turns, outcome.turns[1:], strict=False)
    ]
    assert breaks == [False, True, False]


async def test_a_summary_is_trained_where_it_is_asked_for(tmp_path: Path) -> None:
    script = {
        "Here are the answers": SUMMARISED,
        "": [answer("echo hello > /app/hello.txt"), answer("seq 2000", duration=0.5)],
    }
    outcome, policy = await play(tmp_path, script, source(**SUMMARISING, train_subagents="all"))
    assert isinstance(outcome, Trajectory)
    assert [turn.prompt_ids for turn in outcome.turns] == policy.prompts  # every sampling call, in order
    assert outcome.metrics["subagent_turns"] == 3 and len(outcome.turns) == 7


async def test_the_agents_time_limit_is_graded(tmp_path: Path) -> None:
    folder = variant(tmp_path, task_toml="[agent]\ntimeout_sec = 6\n")
    outcome, _ = await play(tmp_path, [SOLUTION[0], answer("sleep 50", duration=50)], source(folder))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.AGENT_TIMEOUT, 2)


@pytest.mark.parametrize("command", ["exit", "tmux kill-server", "kill -9 -1"])
async def test_closing_the_terminal_is_graded(tmp_path: Path, command: str) -> None:
    outcome, _ = await play(tmp_path, [SOLUTION[0], answer(command, duration=0.5)])
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason, len(outcome.turns)) == (1.0, StopReason.SESSION_CLOSED, 2)


async def test_emptying_tmp_does_not_lose_the_terminal(tmp_path: Path) -> None:
    outcome, _ = await play(tmp_path, solving("rm -rf /tmp/* /tmp/.[!.]*; echo hello > /app/hello.txt"))
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)


async def test_an_agent_that_breaks_its_machine_gets_0_and_not_another_try(tmp_path: Path) -> None:
    script = [
        answer("echo hello > /app/hello.txt; rm -rf --no-preserve-root / 2>/dev/null", duration=3),
        answer("ls"),
    ]
    outcome, _ = await play(tmp_path, script)
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (0.0, StopReason.SESSION_CLOSED)


async def test_a_dead_terminal_in_the_middle_of_a_turn_is_graded(tmp_path: Path) -> None:
    # The second command of the same answer finds no terminal: a RuntimeError in Harbor.
    outcome, _ = await play(
        tmp_path, [answer("echo hello > /app/hello.txt; tmux kill-server", "ls", duration=0.7)]
    )
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.SESSION_CLOSED)


async def test_a_failing_backend_is_a_failure_and_not_a_reward(tmp_path: Path) -> None:
    outcome, policy = await play(tmp_path, [SOLUTION[0], BackendError("sampling: connection refused")])
    assert outcome == TrialFailure(
        task_id="hello-file",
        kind=FailureKind.BACKEND,
        message="sampling: connection refused",
        trial_name=outcome.trial_name,
    )
    assert len(policy.prompts) == 2, "the SDK retries by itself"


class SilentPolicy(ScriptedPolicy):
    """Answers as the script says until it falls silent for ever, as the SDK does with a server that is gone."""

    silent_after = 0

    async def sample(self, request: SampleRequest) -> Turn:
        if len(self.prompts) == self.silent_after:
            await asyncio.Event().wait()
        return await super().sample(request)


@pytest.mark.parametrize("answers", [0, 1])
async def test_an_agent_whose_time_runs_out_on_a_dead_server_is_not_graded(
    tmp_path: Path, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.envs.harbor.trial.ANSWERS_WITHIN_S", 1)
    tasks = source(variant(tmp_path, task_toml="[agent]\ntimeout_sec = 6\n"))
    policy = SilentPolicy(byte_chat(), {"": [answer("true", duration=0.1)]})
    policy.silent_after = answers
    outcome = await tasks.trial(tasks.train[0], directory=tmp_path / "jobs", seed=1, temperature=1.0).run(
        policy
    )
    assert isinstance(outcome, TrialFailure), outcome
    assert outcome.kind is FailureKind.BACKEND
    assert outcome.message.startswith("the agent's time ran out on an answer that had not come for ")


async def test_a_failing_backend_is_not_hidden_by_a_summary(tmp_path: Path) -> None:
    gone = BackendError("sampling: gone")
    script = {"You are about to hand off": [gone], "": [answer("true"), answer("seq 2000", duration=0.5)]}
    outcome, _ = await play(tmp_path, script, source(**SUMMARISING))
    assert isinstance(outcome, TrialFailure) and outcome.kind == FailureKind.BACKEND


async def test_a_verifier_without_a_reward_is_a_failure(tmp_path: Path) -> None:
    outcome, _ = await play(tmp_path, SOLUTION, source(variant(tmp_path, test="true")))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.VERIFIER and "No reward file found" in outcome.message


async def test_a_verifier_that_never_ends_is_a_failure(tmp_path: Path) -> None:
    folder = variant(tmp_path, test="sleep 100", task_toml="[verifier]\ntimeout_sec = 0.5\n")
    outcome, _ = await play(tmp_path, SOLUTION, source(folder))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.VERIFIER and "timed out after 0.5 seconds" in outcome.message


async def test_a_reward_planted_by_the_agent_does_not_count(tmp_path: Path) -> None:
    planted = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    background = "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) >/dev/null 2>&1 &"
    outcome, _ = await play(tmp_path, solving(planted, background))
    assert isinstance(outcome, Trajectory)
    assert outcome.reward == 0.0


async def test_what_the_agent_laid_beside_the_tests_is_gone_when_they_run(tmp_path: Path) -> None:
    folder = variant(tmp_path, test="[ -e /tests/planted ]; echo $? > /logs/verifier/reward.txt")
    outcome, _ = await play(tmp_path, solving("mkdir -p /tests; touch /tests/planted"), source(folder))
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 1.0


async def test_a_verifier_may_have_a_sandbox_of_its_own(tmp_path: Path) -> None:
    folder = variant(
        tmp_path, task_toml='artifacts = ["/app/hello.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    )
    (folder / "tests" / "Dockerfile").write_text("FROM debian\nRUN mkdir /app\nCOPY . /tests\n")
    outcome, _ = await play(tmp_path, SOLUTION, source(folder))
    assert isinstance(outcome, Trajectory), outcome
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)
    (folder / "tests" / "Dockerfile").write_text("FROM debian\nRUN pip install pytest\n")
    with pytest.raises(
        ConfigError, match="tests/Dockerfile:2: the sandbox cannot reach the network for `pip install`"
    ):
        source(folder)


async def test_a_sandbox_that_cannot_be_built_is_a_failure(tmp_path: Path) -> None:
    outcome, policy = await play(
        tmp_path, SOLUTION, source(variant(tmp_path, dockerfile="FROM a\nRUN touch /usr/bin/x\n"))
    )
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == FailureKind.SANDBOX and "environment_type=docker" in outcome.message
    assert policy.prompts == []


async def test_cancelling_a_trial_frees_the_sandbox(tmp_path: Path) -> None:
    tasks = source()
    policy = ScriptedPolicy(byte_chat(), {"": [answer("sleep 60", duration=60)]})
    trial = asyncio.create_task(
        tasks.trial(tasks.train[0], directory=tmp_path, seed=1, temperature=1.0).run(policy)
    )
    async with asyncio.timeout(60):
        await policy.was_asked.wait()
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert left_by(tasks) == {"lock", "skeleton"}


async def test_sixteen_trials_at_once(tmp_path: Path) -> None:
    tasks = source(TASKS)
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
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert left_by(tasks) == {"lock", "skeleton"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "task.toml").unlink(), "no task.toml"),
        (lambda folder: (folder / "instruction.md").unlink(), "no instruction.md"),
        (lambda folder: (folder / "instruction.md").write_text(" \n"), "instruction.md is empty"),
        (lambda folder: (folder / "task.toml").write_text("[agent\n"), "task.toml: "),
        (
            lambda folder: (folder / "task.toml").write_text('[agent]\ntimeout_sec = "soon"\n'),
            "task.toml: agent.timeout_sec: ",
        ),
        (
            lambda folder: (folder / "tests" / "test.sh").unlink(),
            "no tests/test.sh; a task without a verifier cannot be graded",
        ),
        (
            lambda folder: shutil.rmtree(folder / "environment"),
            "no Dockerfile and no [environment].docker_image",
        ),
        (
            lambda folder: (folder / "environment" / "Dockerfile").write_text("FROM a\nRUN pip install x\n"),
            "Dockerfile:2: the sandbox cannot",
        ),
        (
            lambda folder: (folder / "environment" / "docker-compose.yaml").write_text("{}"),
            "the sandbox cannot run several services",
        ),
        (
            lambda folder: (folder / "task.toml").write_text('[agent]\nuser = "alice"\n'),
            "the sandbox has only root",
        ),
        (lambda folder: (folder / "task.toml").write_text("[environment]\ngpus = 1\n"), "no GPU"),
        (
            lambda folder: (folder / "task.toml").write_text(
                '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
            ),
            "no allow list",
        ),
    ],
)
def test_a_broken_task_folder_is_one_clear_line(tmp_path: Path, change: object, message: str) -> None:
    folder = variant(tmp_path)
    change(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError) as error:
        source(folder.parent)
    assert message in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_each_broken_folder_has_its_line(tmp_path: Path) -> None:
    for name in ("a", "b", "good"):
        shutil.copytree(HELLO, tmp_path / name)
    (tmp_path / "a" / "task.toml").unlink()
    (tmp_path / "b" / "instruction.md").unlink()
    with pytest.raises(ConfigError) as error:
        source(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(str(tmp_path / "a")) and lines[1].startswith(str(tmp_path / "b"))
    assert lines[2] == "2 of 3 task folders cannot be played; mend or remove them"


def test_folders_with_the_same_fault_share_a_line(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(HELLO, tmp_path / name)
        (tmp_path / name / "task.toml").unlink()
    with pytest.raises(ConfigError) as error:
        source(tmp_path)
    line, count = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path / 'a'}: no task.toml") and line.endswith("(and 2 more)")
    assert count.startswith("3 of 3 task folders")


def many(tmp_path: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(HELLO, tmp_path / name)
    return tmp_path


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_tasks_are_held_out_by_name_glob_folder_or_share(tmp_path: Path) -> None:
    folder = many(tmp_path / "train", "a-1", "a-2", "b-1", "b-2", "c-1")
    other = many(tmp_path / "other", "z", "c-1")
    assert ids(source(folder).eval) == []
    by_glob = source(folder, eval_tasks=["b-*", "c-1"], eval_split=0.5)
    assert (ids(by_glob.train), ids(by_glob.eval)) == (["a-1", "a-2"], ["b-1", "b-2", "c-1"])
    by_folder = source(folder, eval_tasks=[str(other)])
    assert (len(by_folder.train), ids(by_folder.eval)) == (5, ["other/c-1", "z"])
    by_share = [source(folder, eval_split=0.4, seed=seed) for seed in (3, 3, 4, 5, 6)]
    assert all(len(tasks.eval) == 2 and len(tasks.train) == 3 for tasks in by_share)
    assert ids(by_share[0].eval) == ids(by_share[1].eval)
    assert len({tuple(ids(tasks.eval)) for tasks in by_share}) > 1
    with pytest.raises(ConfigError, match="'nope' is neither a folder nor the name of a task"):
        source(folder, eval_tasks=["nope"])
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        source(folder, eval_tasks=["*"])


def test_a_task_whose_first_prompt_leaves_no_room_is_refused_before_any_work() -> None:
    with pytest.raises(
        ConfigError,
        match=r"hello-file: the first prompt has \d+ tokens or more, so context_limit=2000 leaves no answer",
    ):
        source(context_limit=2000)


async def test_a_debian_image_needs_no_dockerfile_and_gets_the_files_beside_it(tmp_path: Path) -> None:
    folder = variant(tmp_path, task_toml='[environment]\ndocker_image = "debian:12-slim"\nworkdir = "/srv"\n')
    (folder / "environment" / "Dockerfile").unlink()
    (folder / "environment" / "word.txt").write_text("hello\n")
    outcome, _ = await play(
        tmp_path, solving("mkdir /app && cp /srv/word.txt /app/hello.txt"), source(folder)
    )
    assert isinstance(outcome, Trajectory), outcome
    assert outcome.reward == 1.0
    (folder / "task.toml").write_text('[environment]\ndocker_image = "postgres:16"\n')
    with pytest.raises(
        ConfigError,
        match="the sandbox cannot stand in for the image postgres:16; use environment_type=docker",
    ):
        source(folder)


def test_environment_kwargs_become_harbors_own_fields() -> None:
    pairs = {
        "override_cpus": "2",
        "memory_mb": "512",
        "network": "true",
        "force_build": "false",
        "image": "x:1",
        "ratio": "0.5",
    }
    assert environment_options(pairs) == {
        "override_cpus": 2,
        "override_memory_mb": 512,
        "force_build": False,
        "kwargs": {"network": True, "image": "x:1", "ratio": 0.5},
    }
    with pytest.raises(ConfigError, match="override_cpus needs a whole number, not 'two'"):
        environment_options({"override_cpus": "two"})


def test_an_environment_this_machine_lacks_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="environment_type=nowhere is none of"):
        resolve_environment_type("nowhere")
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment_type=daytona: "):
        resolve_environment_type("daytona")
    monkeypatch.setattr("src.envs.harbor.environment.why_no_engine", lambda: "no engine answers")
    assert resolve_environment_type("auto") == "sandbox"
    with pytest.raises(
        ConfigError,
        match="environment_type=docker: no engine answers; start Docker, or use environment_type=sandbox",
    ):
        resolve_environment_type("docker")
    monkeypatch.setattr("src.envs.harbor.environment.why_no_sandbox", lambda: "bubblewrap cannot start")
    with pytest.raises(
        ConfigError,
        match="environment_type=sandbox: bubblewrap cannot start; mend that, or use environment_type=docker",
    ):
        resolve_environment_type("auto")
    monkeypatch.setattr("src.envs.harbor.environment.why_no_engine", lambda: None)
    assert resolve_environment_type("auto") == "docker"


class StreamWatcher(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


async def test_harbor_stays_out_of_our_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    listener = StreamWatcher()
    logging.getLogger().addHandler(listener)
    try:
        await play(tmp_path, SOLUTION)
    finally:
        logging.getLogger().removeHandler(listener)
    assert [name for name in listener.names if name.startswith(("harbor", "LiteLLM"))] == []
    assert capfd.readouterr().err == ""


def test_validate_plays_solution_and_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("hello-file", "count-lines"):
        shutil.copytree(TASKS / name, tmp_path / name)
    (tmp_path / "hello-file" / "tests" / "test.sh").write_text(
        "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    )
    status = validate([f"tasks_dir={tmp_path}", "environment_type=sandbox"])
    assert capsys.readouterr().out.splitlines() == [
        "ok   count-lines: oracle 1.0, nop 0.0, graded fresh",
        "BAD  hello-file: oracle 1.0, nop 1.0, graded fresh",
        f"how each task is graded: {tmp_path / 'grading.json'}",
        "2 tasks in sandbox: 1 sound, 1 unsound",
    ]
    assert status == 1
    assert validate([f"tasks_dir={tmp_path / 'none'}", "environment_type=sandbox"]) == 2
    assert capsys.readouterr().err.startswith("validate: tasks_dir ")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("environment_kwargs=cpus", "environment_kwargs takes key=value"),
        ("n_parallel_envs=0", "n_parallel_envs=0: at"),
    ],
)
def test_options_of_validate_that_cannot_be_honoured_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, line: str
):
    assert validate([f"tasks_dir={tmp_path}", option]) == 2
    assert capsys.readouterr().err.startswith(f"validate: {line}")


@pytest.mark.parametrize(
    "command",
    [
        "cat /dev/zero > /app/big",
        "rm -rf /logs; echo x > /logs",
        "chmod 000 /logs",
        "rm -rf /tests; chmod 555 /",
    ],
)
async def test_an_agent_that_leaves_no_place_to_grade_in_gets_0_and_not_another_try(
    tmp_path: Path, command: str
) -> None:
    outcome, _ = await play(tmp_path, solving(command), source(environment_kwargs=["storage_mb=64"]))
    assert isinstance(outcome, Trajectory) and outcome.reward == 0.0


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no reward\nat all", "RuntimeError: no reward"),
        ("", "RuntimeError: no message"),
        (
            "Docker compose command failed for environment a. Command: docker compose build. Return code: 17. Stdout: #0 building\n\n"
            "#6 RUN false\nfailed to solve: RUN false: exit code: 1\n. Stderr: None. ",
            "RuntimeError: Docker compose command failed for environment a: failed to solve: RUN false: exit code: 1",
        ),
    ],
)
def test_a_failed_build_is_told_by_its_last_line(message, told):
    from harbor.models.trial.result import ExceptionInfo, TrialResult

    from src.envs.harbor.trial import what_happened

    assert (
        what_happened(
            TrialResult.model_construct(exception_info=ExceptionInfo.from_exception(RuntimeError(message)))
        )
        == told
    )
