"""Injects faults into trials, the backend, the disk and the process, in every mode of the trainer.

After each fault, the run must end within its deadline in the expected `RunState` and leave no sandbox and no
asyncio task. If a fault of the backend, the disk or the process stopped the run, it must complete when it is
resumed. The trainer is real. The backend is `DiskBandit`, a fake whose policy has four logits. Each running
trial counts as an open sandbox.
"""

import asyncio
import errno
import json
import os
from typing import Any

import httpx
import pytest
import tinker

from src.core.errors import ServerLost, TrainerError
from src.core.trajectory import FailureKind
from src.loop.connection import Dependencies
from src.loop.run import end_state
from src.policy.sampling_policy import PolicyWrapper, sdk_boundary
from src.records.journal import RunState
from tests.fakes.disk_bandit import DiskBandit
from tests.fakes.run import FakeRun, groups_trained, untimed
from tests.fakes.run_files import records
from tests.fakes.trials import FakeTasks, failure, say_a_token, task

DEADLINE_S = 20
MODES = {
    "synchronous": (),
    "asynchronous": ("max_staleness=1",),
    "streaming": ("stream_groups=true", "loss_reduction=prompt_mean"),
    "both": ("max_staleness=2", "stream_groups=true", "loss_reduction=sequence_mean"),
}


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("src.rollouts.watchdog.CHECK_PERIOD_S", 0.02)
    monkeypatch.setattr("src.loop.connection.RECONNECT_PERIOD_S", 0.02)


class Future:
    """An awaitable like a future of the SDK. Unlike a coroutine, it causes no warning if nobody awaits it."""

    def __init__(self, call):
        self._call = call

    def __await__(self):
        return self._call().__await__()


class PolicyStuckForSeeds(PolicyWrapper):
    """A policy whose calls with certain seeds never return."""

    def __init__(self, policy, seeds):
        super().__init__(policy)
        self._seeds = seeds

    async def sample(self, request):
        if request.seed in self._seeds:
            await for_ever()
        return await super().sample(request)


class Bench(FakeRun):
    """A run that calls `before_trial` before each trial and `before_call` before each call to the backend.

    Both can raise or hang. If `before_trial` returns a result, this is the result of the trial.
    """

    def __init__(self, path, mode, *, before_trial=None, before_call=None):
        super().__init__(path / "run", self._parts)
        self.root = path
        self.mode = mode
        self.open_sandboxes = self.max_open = self.num_started = 0
        self.is_gone = False
        self.stuck_seeds = set()  # Sampling never returns for the trials with these seeds.
        self._before_trial, self._before_call = before_trial, before_call
        self.source = FakeTasks(
            train=[task(f"say-{n}") for n in range(6)],
            eval=[task("held-1"), task("held-2")],
            run_trial=self._run_trial,
        )

    async def _run_trial(self, trial, policy):
        self.open_sandboxes += 1
        self.num_started += 1
        self.max_open = max(self.max_open, self.open_sandboxes)
        try:
            if (
                self._before_trial is not None
                and (result := await self._before_trial(self, trial, policy)) is not None
            ):
                return result
            return await say_a_token(trial, policy)
        finally:
            self.open_sandboxes -= 1

    def _parts(self, config):
        backend: Any = DiskBandit(self.root / "server", load=config.load_checkpoint_path)
        client = backend.training_client
        for owner, names in ((backend, ("policy", "save")), (client, ("forward_backward", "optim_step"))):
            for name in names:
                setattr(owner, name, self._before(name, getattr(owner, name)))
        backend.policy = self._stuck_for_some(backend.policy)
        self.is_gone = False

        async def check():
            if self.is_gone:
                raise ServerLost("the server no longer knows this run's weights")

        backend.check = check
        return Dependencies(source=self.source, backend=backend)

    def _before(self, name, method):
        async def call(*args, **kwargs):
            if self._before_call is not None:
                await self._before_call(self, name)
            return await method(*args, **kwargs)

        async def bounded_call(*args, **kwargs):
            with sdk_boundary(name):
                return await call(*args, **kwargs)

        if name in ("policy", "save"):
            return bounded_call
        return lambda *args, **kwargs: Future(lambda: call(*args, **kwargs))

    def _stuck_for_some(self, make_policy):
        async def make(version):
            return PolicyStuckForSeeds(await make_policy(version), self.stuck_seeds)

        return make

    async def go(self, *options):
        defaults = [
            "tasks_dir=t",
            "batch_size=2",
            "group_size=2",
            "temperature=1",
            "learning_rate=0.3",
            "save_every=2",
            "eval_every=2",
        ]
        defaults += [
            "n_epochs=2",
            "retry_wait_s=0",
            "request_timeout_s=0.5",
            "behavior_if_log_dir_exists=resume",
        ]
        await super().go(*defaults, *MODES[self.mode], *options)

    async def ends(self, *options):
        """Return the state in which the run ends, and assert that it leaves no sandbox and no task."""
        state = RunState.DONE
        try:
            await asyncio.wait_for(self.go(*options), DEADLINE_S)
        except TrainerError as error:
            state = end_state(error)
            assert "\n" not in str(error)
        assert self.open_sandboxes == 0 and self.max_open > 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return state

    def metrics(self):
        return json.dumps(untimed(self.path))

    def weights(self):
        return max((self.root / "server").glob("0*")).read_text()

    def last_event(self):
        return self.lines("journal.jsonl")[-1]


async def uninterrupted(path):
    bench = Bench(path / "uninterrupted", "synchronous")
    assert await bench.ends() is RunState.DONE
    return bench


async def assert_complete(bench):
    """Assert that each group was trained once.

    In synchronous mode, the order of groups is fixed, so the result must equal that of an uninterrupted run
    bit for bit. Returns the uninterrupted run in synchronous mode, else None.
    """
    trained = groups_trained(bench.path)
    assert set(trained.values()) == {1} and len(trained) == 12
    if bench.mode == "synchronous":
        reference = await uninterrupted(bench.root)
        assert bench.metrics() == reference.metrics() and bench.weights() == reference.weights()
        return reference
    return None


async def for_ever():
    await asyncio.Event().wait()


def server_error():
    request = httpx.Request("POST", "http://h:1/api/v1/asample")
    return tinker.InternalServerError("overloaded", response=httpx.Response(503, request=request), body=None)


# Faults of trials. Each case has the fault, the options, the final state, and whether the result equals that
# of a run without the fault.


async def raises(bench, trial, policy):
    if trial.task.id == "say-1":
        raise KeyError("oops")


async def raises_always(bench, trial, policy):
    raise KeyError("oops")


async def cannot_build_a_sandbox(bench, trial, policy):
    return failure(trial.task.id, FailureKind.SANDBOX) if trial.task.id == "say-1" else None


async def cannot_build_any_sandbox(bench, trial, policy):
    return failure(trial.task.id, FailureKind.SANDBOX) if policy.version else None


async def builds_a_sandbox_at_the_third_attempt(bench, trial, policy):
    tries = sum(made.seed == trial.seed and made.directory == trial.directory for made in bench.source.made)
    return failure(trial.task.id, FailureKind.SANDBOX) if tries < 3 else None


async def hangs_in_the_verifier(bench, trial, policy):
    if trial.task.id == "say-1":
        await say_a_token(trial, policy)
        await for_ever()


async def hangs_in_the_sampler(bench, trial, policy):
    if trial.task.id == "say-1":
        bench.stuck_seeds.add(trial.seed)


async def meets_a_burst_of_503(bench, trial, policy):
    if 10 <= bench.num_started < 14:
        return failure(trial.task.id, FailureKind.BACKEND, f"sampling: {server_error()}")
    return None


@pytest.mark.parametrize(
    ("before_trial", "options", "state", "is_exact"),
    [
        (raises, ("max_failure_rate=1",), RunState.DONE, False),
        (raises_always, (), RunState.TOO_MANY_FAILURES, False),
        (cannot_build_a_sandbox, (), RunState.DONE, False),
        (cannot_build_any_sandbox, (), RunState.TOO_MANY_FAILURES, False),
        (builds_a_sandbox_at_the_third_attempt, (), RunState.DONE, True),
        (hangs_in_the_verifier, ("trial_timeout_s=0.5",), RunState.DONE, False),
        (hangs_in_the_sampler, ("request_timeout_s=0.05",), RunState.DONE, False),
        (meets_a_burst_of_503, (), RunState.DONE, True),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_run_ends_as_stated_after_a_fault_of_trials(
    tmp_path, mode, before_trial, options, state, is_exact
):
    bench = Bench(tmp_path, mode, before_trial=before_trial)
    assert await bench.ends(*options) is state
    assert bench.last_event()["state"] == state
    last = records(tmp_path / "run/metrics.jsonl")[-1] if (tmp_path / "run/metrics.jsonl").exists() else {}
    if is_exact:
        assert set(groups_trained(tmp_path / "run").values()) == {1}
        assert mode != "synchronous" or bench.weights() == (await uninterrupted(tmp_path)).weights()
    elif state is RunState.DONE:
        assert last["tasks/quarantined"] == 1 and "say-1 is quarantined: 2 groups" in bench.text.getvalue()
        graded = [
            line
            for path in (tmp_path / "run/rollouts").glob("step*")
            for line in records(path)
            if line["task"] == "say-1"
        ]
        assert graded and all("reward" not in line for line in graded), (
            "a failed trial must not have a reward"
        )


# Faults of calls to the backend.


def at_call(name, number, fault):
    """Return a `before_call` that runs `fault` before call number `number` of `name`, counted from 1."""
    num_calls = 0

    async def before_call(bench, called):
        nonlocal num_calls
        num_calls += called == name
        if called == name and num_calls == number:
            await fault(bench)

    return before_call


async def answers_503(bench):
    raise server_error()


async def is_lost(bench):
    raise tinker.RequestFailedError(
        "the future is gone", request_id="r", category=tinker.types.RequestErrorCategory.Server
    )


async def never_answers(bench):
    await for_ever()


async def restarts(bench):
    bench.is_gone = True
    await for_ever()


CALLS = [
    (name, 3, fault)
    for name in ("forward_backward", "optim_step", "policy")
    for fault in (answers_503, is_lost, never_answers, restarts)
]
CALLS += [("save", 2, fault) for fault in (answers_503, never_answers, restarts)]


@pytest.mark.parametrize(
    ("name", "number", "fault"), CALLS, ids=lambda value: getattr(value, "__name__", None)
)
async def test_a_single_fault_of_a_call_does_not_change_the_result(tmp_path, mode, name, number, fault):
    if mode != "synchronous":
        # Which groups form a step depends on the time. A step in which all rewards are equal makes no call,
        # so the run may make fewer than three calls.
        number = 2
    bench = Bench(tmp_path, mode, before_call=at_call(name, number, fault))
    assert await bench.ends() is RunState.DONE
    reference = await assert_complete(bench)
    assert reference is None or bench.num_started == reference.num_started, "a rollout was repeated"
    assert "server lost or request failed: " in bench.text.getvalue()


@pytest.mark.parametrize("fault", [answers_503, never_answers, restarts], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["optim_step", "save"])
async def test_a_permanent_fault_of_a_call_ends_the_run(tmp_path, mode, name, fault):
    async def before_call(bench, called):
        if called == name:
            await fault(bench)

    bench = Bench(tmp_path, mode, before_call=before_call)
    assert await bench.ends("request_timeout_s=0.2") is RunState.SERVER_LOST
    assert bench.last_event()["state"] == "server_lost" and bench.text.getvalue().count("server lost") <= 3
    resumed = Bench(tmp_path, mode)
    assert await resumed.ends() is RunState.DONE
    await assert_complete(resumed)


# Faults of the disk and the process.


@pytest.mark.parametrize(
    "full_file",
    [
        "metrics.jsonl",
        "checkpoints.jsonl",
        "journal.jsonl",
        "step_000003.jsonl",
        "eval_000002.jsonl",
        ".step_000002.jsonl.new",
    ],
)
async def test_a_run_that_ended_on_a_full_disk_resumes(tmp_path, monkeypatch, mode, full_file):
    real_write, real_fsync = os.write, os.fsync
    # The number of the write to this file that is the first to fail, counted from 1
    num_left = {"journal.jsonl": 30, "metrics.jsonl": 3}.get(full_file, 1)

    def is_full(descriptor):
        nonlocal num_left
        num_left -= os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{full_file}")
        return num_left <= 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{full_file}")

    def write(descriptor, data):
        return real_write(descriptor, data[:5]) if is_full(descriptor) else real_write(descriptor, data)

    def fsync(descriptor):
        if full_file.startswith(".") and is_full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    bench = Bench(tmp_path, mode)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", fsync)
        assert await bench.ends() is RunState.STORAGE
    resumed = Bench(tmp_path, mode)
    assert await resumed.ends() is RunState.DONE
    await assert_complete(resumed)


@pytest.mark.parametrize("number", [0, 3, 5, 9, 14, 17, 24, 30])
async def test_an_interrupted_run_resumes(tmp_path, mode, number):
    waiting = asyncio.Event()

    async def hang(bench, trial, policy):
        if bench.num_started > number:
            waiting.set()
            await for_ever()

    bench = Bench(tmp_path, mode, before_trial=hang)
    running = asyncio.ensure_future(bench.go())
    await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, DEADLINE_S)
    assert bench.open_sandboxes == 0 and asyncio.all_tasks() == {asyncio.current_task()}
    assert bench.last_event()["state"] == "interrupted"
    resumed = Bench(tmp_path, mode)
    assert await resumed.ends() is RunState.DONE
    await assert_complete(resumed)


async def test_a_run_without_tasks_outside_quarantine_stops(tmp_path, mode):
    async def fails_in_the_verifier(bench, trial, policy):
        return (
            failure(trial.task.id, FailureKind.VERIFIER, "no reward file")
            if trial.task.id.startswith("say")
            else None
        )

    bench = Bench(tmp_path, mode, before_trial=fails_in_the_verifier)
    with pytest.raises(
        TrainerError,
        match=r"every training task is quarantined; none of .* failed by verifier, e\.g\. no reward file",
    ):
        await asyncio.wait_for(bench.go("batch_size=1", "max_failure_rate=1"), DEADLINE_S)
