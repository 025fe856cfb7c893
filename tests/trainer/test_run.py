import asyncio
import dataclasses
import errno
import io
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from src.core import wait_notice
from src.core.errors import ConfigError, NothingTrainedError, ServerLost, StorageError, TrainerError
from src.core.log_setup import logging_to_file
from src.core.trajectory import FailureKind, StopReason, Task, ZeroReason
from src.loop.connection import Dependencies
from src.loop.outcome import resume_command
from src.policy.openai_client import ChatReply
from src.records.run_directory import lock_run_dir
from src.rollouts.judge import MODES
from tests.fakes.backend import BanditBackend
from tests.fakes.run import FakeRun, untimed
from tests.fakes.trials import FakeTasks, failure, say_a_token, task

TASKS = [task(f"say-{number:02d}") for number in range(4)]
HELD_OUT = [task("held-01"), task("held-02")]


class Bench(FakeRun):
    """A run with fake trials and `BanditBackend`, whose policy has four logits.

    Keyword arguments are passed to `FakeTasks`.
    """

    def __init__(self, path, **options):
        super().__init__(path / "run", self._parts)
        self.backend = BanditBackend()
        self.source = FakeTasks(train=TASKS, eval=HELD_OUT, **options)
        self.configs = []

    async def go(self, *options):
        defaults = (
            "tasks_dir=t",
            "batch_size=2",
            "group_size=4",
            "learning_rate=2",
            "loss_reduction=sequence_mean",
            "retry_wait_s=0",
        )
        return await super().go(*defaults, *options)

    def _parts(self, config):
        self.configs.append(config)
        return Dependencies(source=self.source, backend=self.backend)


async def waits_said(tmp_path, monkeypatch):
    """Run two steps with slow updates, and return the printed lines about waits."""
    bench = Bench(tmp_path)
    client = bench.backend.training_client
    fast = client.forward_backward

    async def slow(*arguments):
        for _ in range(5):  # iterations of the event loop, during which the notice becomes due
            await asyncio.sleep(0)
        return await fast(*arguments)

    monkeypatch.setattr(client, "forward_backward", slow)
    await bench.go("eval_before_train=false")
    return [line for line in bench.text.getvalue().splitlines() if "waiting for" in line]


async def test_the_first_waits_are_explained_once(tmp_path, monkeypatch):
    monkeypatch.setattr(wait_notice, "SLOW_S", 0.0)
    assert await waits_said(tmp_path, monkeypatch) == [
        "waiting for the first trials; the server may compile its programs",
        "waiting for the first update; the server may compile its programs",
    ]


async def test_every_long_update_is_reported_repeatedly(tmp_path, monkeypatch):
    monkeypatch.setattr(wait_notice, "SLOW_S", 0.0)
    monkeypatch.setattr(wait_notice, "REPEAT_S", 0.0)
    lines = await waits_said(tmp_path, monkeypatch)
    assert lines.count("still waiting for the first update (0 s)") > 1
    assert lines.count("still waiting for the update of step 2 (0 s)") > 1


@pytest.mark.seed_behaviour(22, 35)
async def test_two_steps_write_every_file_and_their_log_lines(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("eval_group_size=2", "save_every=1")
    metrics = bench.lines("metrics.jsonl")
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert "test/env/all/reward/total" in metrics[0] and "test/env/all/reward/total" in metrics[2]
    assert {
        "progress/done_frac",
        "optim/grad_norm",
        "optim/lr",
        "env/all/by_group/frac_mixed",
        "reward/avg_pass_at_4",
    } <= set(metrics[1])
    assert metrics[2]["progress/done_frac"] == 1.0
    assert [(line["batch"], line["final"]) for line in bench.lines("checkpoints.jsonl")] == [
        (1, False),
        (2, True),
    ]
    assert json.loads((bench.path / "config.json").read_text())["group_size"] == 4
    records = bench.lines("rollouts/step_000001.jsonl")
    assert len(records) == 8
    assert set(records[0]) == {
        "task",
        "trial",
        "reward",
        "stop_reason",
        "advantage",
        "turns",
        "tokens",
        "metrics",
    }
    assert {trial.directory for trial in bench.source.made} == {
        bench.path / "jobs" / name for name in bench.source.ended
    }
    assert not (bench.path / "jobs").exists()  # these trials write no files
    assert bench.source.ended == ["eval_000000", "step_000001", "step_000002", "eval_000002"]
    assert (bench.path / "logs.log").exists()
    text = bench.text.getvalue()
    assert "tasks: 4 to train on, 2 held out; 2 steps; loss_fn=ppo\n" in text
    assert "[1/2] say-" in text and "/4 solved, 2.0 turns" in text
    assert "step 2/2" in text and "done: 2 steps in" in text and "held-out success:" in text
    assert str(bench.path) in text.splitlines()[-1]


async def test_the_time_to_sync_weights_is_a_part_of_a_step(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("eval_group_size=2")
    for line in bench.lines("metrics.jsonl")[1:]:
        parts = ("time/rollouts", "time/update", "time/sync_weights", "time/evaluation")
        assert line["time/sync_weights"] > 0
        assert sum(line.get(name, 0.0) for name in parts) <= line["time/total"]


async def test_a_run_without_a_gradient_does_not_end_done(tmp_path):
    async def reward_half(trial, policy):
        return dataclasses.replace(await say_a_token(trial, policy), reward=0.5)

    bench = Bench(tmp_path, run_trial=reward_half)
    with pytest.raises(
        NothingTrainedError,
        match=r"in 2 steps: in every group, all trials have the same reward \(mean of all trials 0.5",
    ):
        await bench.go("eval_before_train=false")
    assert bench.lines("journal.jsonl")[-1]["state"] == "nothing_trained"
    assert "done" not in bench.text.getvalue()
    assert bench.lines("checkpoints.jsonl")[-1]["final"]


async def test_groups_of_one_trial_are_not_called_alike(tmp_path):
    async def reward_half(trial, policy):
        return dataclasses.replace(await say_a_token(trial, policy), reward=0.5)

    options = ("group_size=1", "advantage_estimator=reinforce++", "eval_before_train=false")
    bench = Bench(tmp_path / "a", run_trial=reward_half)
    with pytest.raises(NothingTrainedError, match="in 2 steps: no example has an advantage"):
        await bench.go(*options)
    bench = Bench(tmp_path / "b")
    await bench.go(*options)
    assert "training signal" not in bench.text.getvalue()


async def test_a_broken_environment_ends_the_run_with_its_line(tmp_path):
    async def broken(trial, policy):
        result, detail = await say_a_token(trial, policy), "ZeroDivisionError: by zero (my_env.py:7 in step)"
        return dataclasses.replace(result, reward=0.0, zero_reason=ZeroReason.ENV_ERROR, zero_detail=detail)

    bench = Bench(tmp_path, run_trial=broken)
    bench.source.eval = ()
    message = r"none of the 16 training trials could be graded, .* e.g. say-0\d: ZeroDivisionError: by zero"
    with pytest.raises(NothingTrainedError, match=message):
        await bench.go()
    assert bench.text.getvalue().count("first trial with reward 0 (env_error): say-0") == 1


async def test_each_step_reports_the_longest_event_loop_gap(tmp_path):
    async def blocking(trial, policy):
        time.sleep(0.3)  # noqa: ASYNC251 - The metric reports trials that block the event loop.
        return await say_a_token(trial, policy)

    bench = Bench(tmp_path, run_trial=blocking)
    bench.source.eval = ()
    await bench.go("max_steps=2", "group_size=2", "eval_every=0")
    gaps = [line["time/max_event_loop_gap_s"] for line in bench.lines("metrics.jsonl") if line["step"] > 0]
    assert len(gaps) == 2 and min(gaps) >= 0.2


async def test_the_bandit_learns_to_say_three(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("n_epochs=15", "eval_every=0", "eval_group_size=16", "temperature=1")
    metrics = bench.lines("metrics.jsonl")
    assert metrics[0]["test/env/all/success"] < 0.5
    assert metrics[-1]["test/env/all/success"] > 0.9


@pytest.mark.parametrize(
    "options",
    [
        ["advantage_estimator=rloo"],
        ["advantage_estimator=reinforce++", "normalize_advantages_by_std=true"],
        ["tis=token", "loss_reduction=prompt_mean"],
        ["step_wise_trajectories=true", "kl_penalty_coef=0.001", "kl_estimator=k3"],
    ],
)
async def test_the_bandit_learns_with_every_kind_of_options(tmp_path, options):
    bench = Bench(tmp_path)
    await bench.go("n_epochs=15", "eval_every=0", "eval_group_size=16", "temperature=1", *options)
    metrics = bench.lines("metrics.jsonl")
    assert metrics[-1]["test/env/all/success"] > 0.9
    assert ("forward" in bench.backend.training_client.events) == ("tis=token" in options)
    if "tis=token" in options:
        assert metrics[1]["tis/mean_factor"] == pytest.approx(1.0, abs=1e-5)


async def test_dynamic_sampling_fills_the_batch_with_differing_groups(tmp_path):
    calls = {"n": 0}

    async def same_at_first(trial, policy):
        calls["n"] += 1
        number = calls["n"]
        result = await say_a_token(trial, policy)
        same = number <= 8  # The first batch has 2 groups of 4 trials.
        return dataclasses.replace(result, reward=1.0 if same else float(number % 2))

    bench = Bench(tmp_path, run_trial=same_at_first)
    bench.source.eval = ()
    await bench.go("max_steps=1", "dynamic_sampling=filter")
    [metrics] = [line for line in bench.lines("metrics.jsonl") if line["step"] == 1]
    assert (metrics["dynamic_sampling/batches"], metrics["dynamic_sampling/bad_groups"]) == (2, 2)
    assert metrics["tokens/trained"] == 16  # two groups of four trials of two tokens
    # Every trial is recorded, even if it is not trained.
    assert len(bench.lines("rollouts/step_000001.jsonl")) == 16
    assert {trial.directory.name for trial in bench.source.made} == {"step_000001", "refill-1_000001"}
    assert bench.backend.versions == [0, 1]  # A refill is not a step.


async def test_the_learning_rate_schedule_spans_the_run(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("n_epochs=2", "lr_schedule=linear", "lr_warmup_steps=1", "eval_every=0")
    assert [line["optim/lr"] for line in bench.lines("metrics.jsonl")[1:]] == pytest.approx(
        [2, 2, 4 / 3, 2 / 3]
    )


@pytest.mark.seed_behaviour(78)
async def test_num_substeps_are_the_optimizer_steps_of_a_batch(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("batch_size=4", "num_substeps=2", "max_steps=1", "eval_every=0")
    assert bench.backend.training_client.events.count("optim_step") == 2
    assert [line["optim/num_substeps"] for line in bench.lines("metrics.jsonl")[1:]] == [2]


async def test_each_batch_is_sampled_with_the_weights_of_the_last_step(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("num_substeps=2")
    assert bench.backend.versions == [0, 1, 2]
    versions = [
        (record["sampling_client/step_min"], record["sampling_client/step_max"])
        for record in bench.lines("metrics.jsonl")[1:]
    ]
    assert versions == [(0, 0), (1, 1)]


async def test_a_resume_reports_the_steps_of_this_process(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")
    resumed = Bench(tmp_path)
    await resumed.go("behavior_if_log_dir_exists=resume", "max_steps=2")
    assert "done: 1 step (2 in total) in " in resumed.text.getvalue()
    finished = Bench(tmp_path)
    await finished.go("behavior_if_log_dir_exists=resume", "max_steps=2")
    text = finished.text.getvalue()
    assert "nothing to do: all 2 steps are finished; add max_steps=4 n_epochs=2 to train further" in text
    assert "done:" not in text
    await finished.go("behavior_if_log_dir_exists=resume")
    assert "all 2 steps are finished; add n_epochs=2 to train further" in finished.text.getvalue()
    further = Bench(tmp_path)
    await further.go("behavior_if_log_dir_exists=resume", "max_steps=4", "n_epochs=2")
    assert "done: 2 steps (4 in total) in " in further.text.getvalue()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_resumed_run_shows_its_first_evaluation(tmp_path, first):
    options = ("eval_group_size=2", f"eval_before_train={first == 0}")
    bench = Bench(tmp_path)
    await bench.go("max_steps=1", *options)
    resumed = Bench(tmp_path)
    await resumed.go("behavior_if_log_dir_exists=resume", "max_steps=2", *options)
    columns = []
    for text, header in ((bench.text, f"step {first}"), (resumed.text, f"step {first} step 2")):
        lines = [line.split() for line in text.getvalue().splitlines()]
        start = lines.index(["held-out", "task", *header.split()]) + 1
        columns.append([row[:2] for row in lines[start : start + len(HELD_OUT)]])
    assert columns[0] == columns[1]


async def test_a_resumed_run_continues_after_its_checkpoint(tmp_path):
    unbroken = Bench(tmp_path / "a")
    await unbroken.go()
    first = Bench(tmp_path / "b")
    await first.go("max_steps=1")
    second = Bench(tmp_path / "b")
    second.backend.training_client.logits = first.backend.saved["000001"]
    await second.go("behavior_if_log_dir_exists=resume")
    assert second.configs[0].load_checkpoint_path == "tinker://run/weights/000001"
    assert [record["step"] for record in second.lines("metrics.jsonl")] == [0, 1, 2]
    assert second.backend.training_client.logits.tolist() == unbroken.backend.training_client.logits.tolist()


@pytest.fixture
def no_checkpoint(monkeypatch):
    """Every save raises RuntimeError, as if the process was killed before its checkpoint."""

    async def save(self, name):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(BanditBackend, "save", save)
        yield patch


@pytest.mark.parametrize("mode", ["max_staleness=0", "max_staleness=1", "task_sampling=thompson"])
async def test_rollouts_of_lost_weights_are_run_again(tmp_path, no_checkpoint, mode):
    options = (mode, "eval_every=1", "n_epochs=2", "save_every=0", "behavior_if_log_dir_exists=resume")
    for rate in (2, 0.5):
        bench = Bench(tmp_path)
        with pytest.raises(RuntimeError):
            await bench.go(*options, f"learning_rate={rate}")
    no_checkpoint.undo()
    fresh = Bench(tmp_path / "fresh")
    await fresh.go(*options, "learning_rate=0.5")
    # With max_staleness=1, the results depend on the order in which groups end, and so on the time.
    if mode != "max_staleness=1":
        assert untimed(bench.path) == untimed(fresh.path)
    assert "learning_rate changed: " in bench.text.getvalue()
    again = Bench(tmp_path)
    # max_tokens only limits future turns, so no rollout is run again.
    await again.go(*options, "learning_rate=0.5", "max_tokens=7")
    assert "run again" not in again.text.getvalue()


async def test_streaming_after_a_resume_gives_other_weights(tmp_path, no_checkpoint):
    options = ("max_staleness=1", "loss_reduction=prompt_mean", "behavior_if_log_dir_exists=resume")
    for changes in ((), ("stream_groups=true",)):
        bench = Bench(tmp_path)
        with pytest.raises(RuntimeError):
            await bench.go(*options, *changes)
    assert "stream_groups changed: " in bench.text.getvalue()


@pytest.mark.parametrize("option", ["load_checkpoint_path=tinker://b", "load_optimizer=false"])
async def test_a_resumed_run_keeps_its_initial_weights(tmp_path, no_checkpoint, option):
    start = "load_checkpoint_path=tinker://a"
    with pytest.raises(RuntimeError):
        await Bench(tmp_path).go(start)
    with pytest.raises(ConfigError, match=f"has {start}, not .*b|has load_optimizer=True, not False"):
        await Bench(tmp_path).go(start, "behavior_if_log_dir_exists=resume", option)


async def resumed_trials(tmp_path, directory, *options, tasks=TASKS, held_out=HELD_OUT):
    """Stop a run during its trials in `directory`. Resume it with other options or tasks, and return the
    number of trials that are run in each directory, and the printed text."""
    bench = Bench(tmp_path)
    fixed = ("eval_every=1", "n_parallel_envs=1", "behavior_if_log_dir_exists=resume")
    running = asyncio.ensure_future(bench.go(*fixed))

    async def stop(trial, policy):
        if [made.directory.name for made in bench.source.made].count(directory) == 6:
            running.cancel()
        return await say_a_token(trial, policy)

    bench.source.run_trial = stop
    with pytest.raises(asyncio.CancelledError):
        await running
    again = Bench(tmp_path)
    again.source.train, again.source.eval = tasks, held_out
    await again.go(*fixed, *options)
    return Counter(trial.directory.name for trial in again.source.made), again.text.getvalue()


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ("max_tokens=7", {"eval_000001": 3, "step_000002": 8, "eval_000002": 8}),
        ("temperature=0.5", {"eval_000001": 8, "step_000002": 8, "eval_000002": 8}),
        ("eval_temperature=0.5", {"eval_000001": 8, "step_000002": 8, "eval_000002": 8}),
        ("eval_top_p=0.5", {"eval_000001": 8, "step_000002": 8, "eval_000002": 8}),
    ],
)
async def test_one_evaluation_does_not_mix_sampling_options(tmp_path, option, counts):
    assert (await resumed_trials(tmp_path, "eval_000001", option))[0] == counts


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ("temperature=0.5", {"step_000002": 8, "eval_000002": 8}),
        ("eval_temperature=0.5", {"step_000002": 3, "eval_000002": 8}),
    ],
)
async def test_one_group_does_not_mix_sampling_options(tmp_path, option, counts):
    assert (await resumed_trials(tmp_path, "step_000002", option))[0] == counts


async def test_trials_of_changed_tasks_are_run_again(tmp_path):
    changed = [dataclasses.replace(task, row={"answer": 2}) for task in TASKS]
    counts, text = await resumed_trials(tmp_path, "step_000002", tasks=changed)
    assert counts == {"step_000002": 8, "eval_000002": 8}
    assert "the content of say-00 (and 3 more) changed: 5 rollouts after step 1 will be run again" in text


async def test_trials_of_changed_held_out_tasks_are_run_again(tmp_path):
    changed = [dataclasses.replace(HELD_OUT[0], row={"answer": 2}), HELD_OUT[1]]
    counts, text = await resumed_trials(tmp_path, "eval_000001", held_out=changed)
    assert counts == {"eval_000001": 7, "step_000002": 8, "eval_000002": 8}
    assert "the content of held-01 changed: 4 rollouts after step 1 will be run again" in text


async def test_a_directory_with_a_run_is_changed_only_on_request(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")
    before = (bench.path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="behavior_if_log_dir_exists=resume"):
        await bench.go()
    with pytest.raises(ConfigError, match="has group_size=4, not 8"):
        await bench.go("behavior_if_log_dir_exists=resume", "group_size=8")
    assert (bench.path / "metrics.jsonl").read_text() == before
    await bench.go("behavior_if_log_dir_exists=delete")
    assert [record["step"] for record in bench.lines("metrics.jsonl")] == [0, 1, 2]


async def test_a_directory_that_cannot_be_deleted_gives_a_one_line_error(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")

    def rename(path, target):  # The mount point of a volume cannot be renamed.
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match=r"run: Device or resource busy; delete its content"):
        await bench.go("behavior_if_log_dir_exists=delete")


async def test_ctrl_d_at_the_question_gives_a_one_line_error(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal(""))
    with pytest.raises(ConfigError, match="has a run; add behavior_if_log_dir_exists=resume or =delete"):
        await bench.go("behavior_if_log_dir_exists=ask")


@pytest.mark.parametrize("behavior", ["resume", "delete", "raise"])
async def test_a_run_directory_in_use_is_refused(tmp_path, behavior):
    entered, free = asyncio.Event(), asyncio.Event()

    async def wait(trial, policy):
        entered.set()
        await free.wait()
        return await say_a_token(trial, policy)

    first, second = Bench(tmp_path, run_trial=wait), Bench(tmp_path)
    running = asyncio.create_task(first.go())
    await entered.wait()
    with pytest.raises(ConfigError, match="is in use by a running process"):
        await second.go(f"behavior_if_log_dir_exists={behavior}")
    free.set()
    await running
    assert [record["step"] for record in first.lines("metrics.jsonl")] == [0, 1, 2]
    await second.go("behavior_if_log_dir_exists=delete")


def test_the_lock_of_a_new_directory_is_next_to_it(tmp_path, monkeypatch):
    # The parent counts as not writable. If the lock file next to the new directory cannot be opened, the
    # error states the reason.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with lock_run_dir(tmp_path / "new"):
        assert (tmp_path / ".new.lock").exists()


async def test_a_file_is_refused_as_a_run_directory(tmp_path):
    bench = Bench(tmp_path)
    bench.path.write_text("")
    with pytest.raises(ConfigError, match="is not a directory; give another log_path"):
        await bench.go()


async def test_a_directory_that_is_no_run_is_never_deleted(tmp_path):
    bench = Bench(tmp_path)
    bench.path.mkdir()
    (bench.path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="has no run"):
        await bench.go("behavior_if_log_dir_exists=delete")
    assert (bench.path / "thesis.tex").exists()


async def test_a_run_without_results_leaves_its_directory_free(tmp_path):
    async def fail(trial, policy):
        return failure(trial.task.id)

    bench = Bench(tmp_path, run_trial=fail)
    with pytest.raises(TrainerError, match="evaluation 0"):
        await bench.go()
    bench.source.run_trial = say_a_token
    await bench.go()
    assert [record["step"] for record in bench.lines("metrics.jsonl")] == [0, 1, 2]


async def cancelled_with_version(bench: Bench, version: int, *options: str) -> None:
    """Run until a trial samples from the weights of this version, and cancel the run."""
    reached = asyncio.Event()

    async def hang(trial, policy):
        if policy.version == version:
            reached.set()
            await asyncio.Event().wait()
        return await say_a_token(trial, policy)

    bench.source.run_trial = hang
    running = asyncio.ensure_future(bench.go(*options))
    await asyncio.wait_for(reached.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    bench.source.run_trial = say_a_token


async def test_a_cancelled_run_saves_a_checkpoint_and_can_resume(tmp_path):
    bench = Bench(tmp_path)
    await cancelled_with_version(bench, 1)
    assert [(line["batch"], line["final"]) for line in bench.lines("checkpoints.jsonl")] == [(1, False)]
    assert "checkpoint after step 1: tinker://run/weights/000001" in bench.text.getvalue()
    assert bench.text.getvalue().splitlines()[-1] == f"continue: {resume_command(bench.path)}"
    await bench.go("behavior_if_log_dir_exists=resume")
    assert [line["batch"] for line in bench.lines("checkpoints.jsonl")] == [1, 2]


async def test_a_new_run_never_loads_a_checkpoint_of_the_old_one(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    await cancelled_with_version(bench, 0, "eval_before_train=false")
    assert [line["batch"] for line in bench.lines("checkpoints.jsonl")] == [0]
    policy = bench.backend.policy

    async def lose_the_server_once(version):
        if version == 1:
            monkeypatch.setattr(bench.backend, "policy", policy)
            raise ServerLost("gone")
        return await policy(version)

    monkeypatch.setattr(bench.backend, "policy", lose_the_server_once)
    await bench.go("lora_rank=4")  # the directory has no result, so another run can use it
    assert [config.load_checkpoint_path for config in bench.configs] == [None, None, None]


@pytest.mark.parametrize("ahead", [["max_staleness=1", "loss_fn=ppo"], ["stream_groups=true"]])
async def test_a_streaming_run_resumes_only_with_streaming(tmp_path, ahead):
    """A step that rolls out its own batch would repeat groups of an earlier step and omit others."""
    bench = Bench(tmp_path)
    await bench.go("max_steps=1", *ahead)
    with pytest.raises(
        ConfigError, match="takes groups in the order in which they end; resume it with max_staleness=1"
    ):
        await bench.go("behavior_if_log_dir_exists=resume")
    await bench.go("behavior_if_log_dir_exists=resume", *ahead)
    assert [record["step"] for record in bench.lines("metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("fails", [True, False])
async def test_a_failing_close_does_not_hide_the_outcome(tmp_path, monkeypatch, caplog, fails):
    async def close():
        await (asyncio.sleep(0) if fails else asyncio.Event().wait())
        raise ZeroDivisionError

    monkeypatch.setattr("src.envs.base.CLOSE_TIMEOUT_S", 0.05)
    bench = Bench(tmp_path)
    bench.source.close = close
    await asyncio.wait_for(bench.go("max_steps=1"), 60)
    assert "done: 1 step in" in bench.text.getvalue()
    assert "the environment did not close" in caplog.text


async def test_a_run_stopped_in_its_last_evaluation_is_checkpointed(tmp_path):
    bench = Bench(tmp_path)
    await cancelled_with_version(bench, 2)
    assert [(line["batch"], line["final"]) for line in bench.lines("checkpoints.jsonl")][-1] == (2, True)


@pytest.mark.parametrize("max_steps", [2, 3])
async def test_wandb_gets_an_interrupted_step_after_the_resume(tmp_path, monkeypatch, max_steps):
    """If the evaluation is still due after the resume, its metrics are sent with the interrupted step."""
    sent = []
    monkeypatch.setattr(
        "src.records.tracking.RunLog._send",
        lambda self, step, metrics, **_: sent.append((step, "test/env/all/success" in metrics)),
    )
    bench = Bench(tmp_path)
    await cancelled_with_version(bench, 2, "n_epochs=2", "max_steps=2", "eval_every=0")
    assert sent == [(0, True), (1, False)]
    await bench.go(
        "n_epochs=2", f"max_steps={max_steps}", "eval_every=0", "behavior_if_log_dir_exists=resume"
    )
    assert sent[2:] == ([(2, True)] if max_steps == 2 else [(2, False), (3, True)])


async def test_an_update_that_has_begun_is_finished_before_a_stop(tmp_path):
    bench = Bench(tmp_path)
    client = bench.backend.training_client
    queued = asyncio.Event()
    resume = asyncio.Event()
    step = client.optim_step

    async def slow_step(adam):
        queued.set()
        await resume.wait()
        return await step(adam)

    client.optim_step = slow_step
    running = asyncio.ensure_future(bench.go())
    await asyncio.wait_for(queued.wait(), 10)
    running.cancel()
    await asyncio.sleep(0)
    resume.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert client.events == ["forward_backward", "optim_step"]
    assert bench.lines("checkpoints.jsonl")[0]["batch"] == 1


async def test_a_run_whose_trials_all_fail_names_the_main_cause(tmp_path):
    async def fail(trial, policy):
        if policy.version == 0:
            return await say_a_token(trial, policy)
        return failure(trial.task.id, FailureKind.SANDBOX, "no tmux\nlong story")

    bench = Bench(tmp_path, run_trial=fail)
    with pytest.raises(TrainerError) as error:
        await bench.go()
    assert str(error.value).startswith(
        "none of the 8 trials of step 2 could be graded; 8 failed by sandbox, e.g. no tmux; see "
    )
    assert bench.lines("checkpoints.jsonl")[0]["batch"] == 1


async def test_failed_trials_leave_their_group_and_are_counted(tmp_path):
    async def fail_odd_seeds(trial, policy):
        if trial.seed % 2:
            return failure(trial.task.id, FailureKind.AGENT)
        return await say_a_token(trial, policy)

    bench = Bench(tmp_path, run_trial=fail_odd_seeds)
    await bench.go("max_steps=1", "eval_split=0")
    record = bench.lines("metrics.jsonl")[1]
    assert record["trials/failed/agent"] + record["trials/graded"] == record["trials/total"] == 8
    assert record["trials/failed/agent"] > 0
    assert (
        sum("failure" in line for line in bench.lines("rollouts/step_000001.jsonl"))
        == record["trials/failed/agent"]
    )


async def test_a_masked_trial_is_recorded_without_an_advantage(tmp_path):
    async def cut_odd_seeds(trial, policy):
        result = await say_a_token(trial, policy)
        return dataclasses.replace(result, stop_reason=StopReason.LENGTH) if trial.seed % 2 else result

    bench = Bench(tmp_path, run_trial=cut_odd_seeds)
    await bench.go("max_steps=1", "apply_overlong_filtering=stop_reason")
    has_advantage = {
        line["stop_reason"]: line["advantage"] is not None
        for line in bench.lines("rollouts/step_000001.jsonl")
    }
    assert has_advantage == {"stop": True, "length": False}


async def test_a_run_stopped_in_its_first_evaluation_is_kept(tmp_path):
    started = asyncio.Event()

    async def hang_after_three(trial, policy):
        if len(bench.source.made) > 3:
            started.set()
            await asyncio.Event().wait()
        return await say_a_token(trial, policy)

    bench = Bench(tmp_path, run_trial=hang_after_three)
    running = asyncio.ensure_future(bench.go("n_parallel_envs=1"))
    await asyncio.wait_for(started.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (bench.path / "metrics.jsonl").exists() and len(bench.lines("finished/eval_000000.jsonl")) == 3
    bench.source.run_trial = say_a_token
    with pytest.raises(ConfigError, match="behavior_if_log_dir_exists=resume"):
        await bench.go()
    num_made = len(bench.source.made)
    await bench.go("behavior_if_log_dir_exists=resume", "max_steps=1")
    # The remaining trials of the evaluation, and those of the step and of the last evaluation.
    assert len(bench.source.made) - num_made == 8 - 3 + 8 + 8
    await bench.go("behavior_if_log_dir_exists=delete", "max_steps=1")
    assert len([line for line in bench.lines("journal.jsonl") if line["event"] == "started"]) == 1


async def test_a_directory_whose_tasks_have_changed_is_refused_by_name(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")
    bench.source.train = [task("new-00"), *TASKS[1:]]
    (bench.path / "checkpoints.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"step 1 of this run has the tasks .*: the data, or the"):
        await bench.go("behavior_if_log_dir_exists=resume")


def test_a_full_disk_prints_no_logging_tracebacks(capsys):
    with logging_to_file(Path("/dev/full")):
        logging.getLogger("src").warning("lost")
    assert capsys.readouterr().err == ""


async def test_an_unusable_export_path_is_refused_at_the_start(tmp_path):
    (tmp_path / "dumps").write_text("")
    bench = Bench(tmp_path)
    with pytest.raises(ConfigError, match=r"^export_path=.*dumps cannot be written"):
        await bench.go(f"export_path={tmp_path / 'dumps'}")
    assert not bench.configs and not bench.path.exists()


async def test_a_log_that_cannot_be_written_gives_one_line(tmp_path):
    (tmp_path / "run" / "logs.log").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"^cannot write .*logs\.log: Is a directory; "):
        await Bench(tmp_path).go()


async def test_the_kl_penalty_is_measured_against_the_base_model(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("kl_penalty_coef=0.1")
    records = bench.lines("metrics.jsonl")
    assert records[1]["optim/kl_policy_base"] == pytest.approx(0, abs=1e-6)
    assert records[2]["optim/kl_policy_base"] != 0


async def test_distillation_alone_moves_the_policy_to_the_teacher(tmp_path):
    bench = Bench(tmp_path)
    client = bench.backend.training_client
    client.logits = np.array([2.0, 0.0, 0.0, 0.0])  # The teacher's distribution is uniform.
    await bench.go("teacher=tinker://t/sampler_weights/1", "reward_coef=0", "n_epochs=4")
    assert bench.lines("metrics.jsonl")[1]["optim/kl_policy_teacher"] > 0.2
    assert np.ptp(client.logits) < 1
    assert bench.backend.opened == ["tinker://t/sampler_weights/1"]


async def test_a_held_out_copy_of_a_training_task_is_refused(tmp_path):
    bench = Bench(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "test.sh").write_text("exit 0")
    bench.source.train = [Task(id="a", path=tmp_path / "a", instruction="do it")]
    bench.source.eval = [Task(id="b", path=tmp_path / "b", instruction="do it")]
    with pytest.raises(
        ConfigError, match="held-out tasks are also training tasks: b is training task a under another name"
    ):
        await bench.go()
    assert not bench.path.exists()
    bench.source.eval += [Task(id="c", path=tmp_path / "c", instruction="another")]
    with pytest.raises(ConfigError, match=r"two sets; for example, choose other tasks with eval_tasks=c$"):
        await bench.go()
    # Here, eval_tasks is a directory, so the message cannot propose names.
    with pytest.raises(ConfigError, match=r"two sets$"):
        await bench.go(f"eval_tasks={tmp_path}")


async def test_without_eval_before_train_the_first_line_is_step_1(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("eval_before_train=false", "max_steps=1")
    assert [record["step"] for record in bench.lines("metrics.jsonl")] == [1]
    assert {"test/pass_at_1", "test/pass_at_1_low", "test/pass_hat_4"} <= set(bench.lines("metrics.jsonl")[0])
    assert set(json.loads((bench.path / "train_tasks.json").read_text())) == {task.id for task in TASKS}


@pytest.mark.seed_behaviour(74)
async def test_a_full_fine_tuning_learning_rate_is_reported(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("max_steps=1", "learning_rate=5e-7", "eval_every=0", "eval_before_train=false")
    assert (
        "learning_rate=5e-07 is usual for full fine-tuning; use a rate that is at least ten times as large"
        in bench.text.getvalue()
    )


EVERY_STEP = {  # metric names of the seed documents
    *(
        "generation/avg_reward",
        "generation/success_rate",
        "train/avg_reward",
        "train/min_reward",
        "train/max_reward",
    ),
    *(
        "reward/avg_raw_reward",
        "loss/avg_raw_rewards",
        "loss/avg_raw_advantages",
        "timing/step",
        "timing/generate",
    ),
}


@pytest.mark.seed_behaviour(24, 25)
async def test_steps_and_evaluations_have_the_seeds_metric_names(tmp_path):
    bench = Bench(tmp_path)
    await bench.go("n_epochs=2", "eval_every=2")
    lines = bench.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(set(line) >= EVERY_STEP for line in lines[1:])
    assert [line["step"] for line in lines if "eval/all/avg_score" in line] == [0, 2, 4]


@pytest.mark.seed_behaviour(71)
async def test_a_run_without_held_out_tasks_evaluates_nothing(tmp_path):
    bench = Bench(tmp_path)
    bench.source.eval = []
    await bench.go("max_steps=1", "eval_every=1")
    assert not any(
        name.startswith(("test/", "eval/")) for line in bench.lines("metrics.jsonl") for name in line
    )
    assert not (bench.path / "dumped_evals").exists()


class ApprovingJudge:
    """A judge that finds no failure."""

    model = "judge-1"

    def __init__(self):
        self.num_calls = 0

    async def reply(self, messages, *, temperature, seed):
        self.num_calls += 1
        return ChatReply(text=json.dumps(dict.fromkeys(MODES, False)))

    async def close(self):
        pass


@pytest.mark.seed_behaviour(41)
async def test_a_judge_changes_training_rewards_but_no_success_rate(tmp_path, monkeypatch):
    bench, judge = Bench(tmp_path), ApprovingJudge()
    monkeypatch.setattr("src.loop.run.open_endpoint", lambda base_url, model: judge)
    await bench.go(
        "max_steps=1",
        "taxonomy_feedback=true",
        "judge_model=m",
        "judge_base_url=http://h:1/v1",
        "taxonomy_alpha=0.5",
    )
    before, step = bench.lines("metrics.jsonl")
    assert judge.num_calls == 1  # All fake trials have the same empty conversation.
    assert (
        step["reward/avg_shaped_reward"]
        == step["reward/avg_raw_reward"] + 0.5
        == step["loss/avg_final_rewards"]
    )
    assert step["env/all/success"] <= 1 and step["train/max_reward"] <= 1 and step["judge/calls"] == 1
    assert not any("judge" in name or "shaped" in name for name in before)
    assert all(line["bonus"] == 0.5 for line in bench.lines("rollouts/step_000001.jsonl"))
