"""Whatever goes wrong, a run ends in a named state within its deadline, with every sandbox freed and no task left; and can be resumed.

The trainer is the real one, on a bandit server and on trials whose sandboxes are counted.
"""

import asyncio
import errno
import json
import os

import httpx
import pytest
import tinker

from src.core.errors import ServerLost, TrainerError
from src.core.trajectory import FailureKind
from src.loop.connection import Dependencies
from src.loop.run import end_state
from src.policy.sampling_policy import NewestPolicy, sdk_boundary
from src.records.journal import RunState
from src.rollouts.watchdog import WatchedPolicy
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
    monkeypatch.setattr("src.rollouts.watchdog.PROBE_PERIOD_S", 0.02)
    monkeypatch.setattr("src.loop.connection.RECONNECT_PERIOD_S", 0.02)


class Future:
    """What the SDK hands out: nobody has to await it."""

    def __init__(self, call):
        self._call = call

    def __await__(self):
        return self._call().__await__()


class Bench(FakeRun):
    """`during` is asked before each trial, `calls` before each call to the back end; either may raise or hang."""

    def __init__(self, path, mode, *, during=None, calls=None):
        super().__init__(path / "run", self._parts)
        self.root = path
        self.mode = mode
        self.open_sandboxes = self.most_open = self.num_started = 0
        self.is_gone = False
        self._during, self._calls = during, calls
        self.source = FakeTasks(
            train=[task(f"say-{n}") for n in range(6)], eval=[task("held-1"), task("held-2")], play=self._play
        )

    async def _play(self, trial, policy):
        self.open_sandboxes += 1
        self.num_started += 1
        self.most_open = max(self.most_open, self.open_sandboxes)
        try:
            if self._during is not None and (result := await self._during(self, trial, policy)) is not None:
                return result
            return await say_a_token(trial, policy)
        finally:
            self.open_sandboxes -= 1

    def _parts(self, config):
        backend = DiskBandit(self.root / "server", load=config.load_checkpoint_path)
        client = backend.training_client
        for owner, names in ((backend, ("policy", "save")), (client, ("forward_backward", "optim_step"))):
            for name in names:
                setattr(owner, name, self._before(name, getattr(owner, name)))
        self.is_gone = False

        async def check():
            if self.is_gone:
                raise ServerLost("the server no longer knows this run's weights")

        backend.check = check
        return Dependencies(source=self.source, backend=backend)

    def _before(self, name, method):
        async def call(*args, **kwargs):
            if self._calls is not None:
                await self._calls(self, name)
            return await method(*args, **kwargs)

        async def bounded_call(*args, **kwargs):
            with sdk_boundary(name):
                return await call(*args, **kwargs)

        if name in ("policy", "save"):
            return bounded_call
        return lambda *args, **kwargs: Future(lambda: call(*args, **kwargs))

    async def go(self, *options):
        usual = [
            "tasks_dir=t",
            "batch_size=2",
            "group_size=2",
            "temperature=1",
            "learning_rate=0.3",
            "save_every=2",
            "eval_every=2",
        ]
        usual += [
            "n_epochs=2",
            "retry_wait_s=0",
            "request_timeout_s=0.5",
            "behavior_if_log_dir_exists=resume",
        ]
        await super().go(*usual, *MODES[self.mode], *options)

    async def ends(self, *options):
        """The state in which the run ends, after which nothing of it is left."""
        state = RunState.DONE
        try:
            await asyncio.wait_for(self.go(*options), DEADLINE_S)
        except TrainerError as error:
            state = end_state(error)
            assert "\n" not in str(error)
        assert self.open_sandboxes == 0 and self.most_open > 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return state

    def metrics(self):
        return json.dumps(untimed(self.path))

    def weights(self):
        return max((self.root / "server").glob("0*")).read_text()

    def last_event(self):
        return self.lines("journal.jsonl")[-1]


async def unbroken(path):
    bench = Bench(path / "unbroken", "synchronous")
    assert await bench.ends() is RunState.DONE
    return bench


async def assert_whole(bench):
    """The run has ended as if nothing had happened: to the bit where the order of groups is fixed. The unbroken run, then."""
    trained = groups_trained(bench.path)
    assert set(trained.values()) == {1} and len(trained) == 12
    if bench.mode == "synchronous":
        whole = await unbroken(bench.root)
        assert bench.metrics() == whole.metrics() and bench.weights() == whole.weights()
        return whole
    return None


async def for_ever():
    await asyncio.Event().wait()


def server_error(status=503):
    request = httpx.Request("POST", "http://h:1/api/v1/asample")
    return tinker.InternalServerError(
        "overloaded", response=httpx.Response(status, request=request), body=None
    )


# What happens to trials. Each: the fault, the options, the state; True where the outcome is that of the unbroken run.


async def raises(bench, trial, policy):
    if trial.task.id == "say-1":
        raise KeyError("oops")


async def raises_always(bench, trial, policy):
    raise KeyError("oops")


async def builds_no_sandbox(bench, trial, policy):
    return failure(trial.task.id, FailureKind.SANDBOX) if trial.task.id == "say-1" else None


async def builds_no_sandbox_anywhere(bench, trial, policy):
    return failure(trial.task.id, FailureKind.SANDBOX) if policy.version else None


async def builds_a_sandbox_the_third_time(bench, trial, policy):
    tries = sum(made.seed == trial.seed and made.directory == trial.directory for made in bench.source.made)
    return failure(trial.task.id, FailureKind.SANDBOX) if tries < 3 else None


async def hangs_in_the_verifier(bench, trial, policy):
    if trial.task.id == "say-1":
        await say_a_token(trial, policy)
        await for_ever()


async def hangs_where_the_sampler_is_stuck(bench, trial, policy):
    if trial.task.id == "say-1":
        watched = policy.policy if isinstance(policy, NewestPolicy) else policy
        return await say_a_token(trial, WatchedPolicy(Stuck(policy.version), watched.watchdog))
    return None


class Stuck:
    def __init__(self, version):
        self.version = version

    async def sample(self, request):
        await for_ever()


async def meets_a_burst_of_503(bench, trial, policy):
    if 10 <= bench.num_started < 14:
        raise_for = server_error()
        return failure(trial.task.id, FailureKind.BACKEND, f"sampling: {raise_for}")
    return None


@pytest.mark.parametrize(
    ("during", "options", "state", "is_exact"),
    [
        (raises, ("max_failure_rate=1",), RunState.DONE, False),
        (raises_always, (), RunState.TOO_MANY_FAILURES, False),
        (builds_no_sandbox, (), RunState.DONE, False),
        (builds_no_sandbox_anywhere, (), RunState.TOO_MANY_FAILURES, False),
        (builds_a_sandbox_the_third_time, (), RunState.DONE, True),
        (hangs_in_the_verifier, ("trial_timeout_s=0.5",), RunState.DONE, False),
        (hangs_where_the_sampler_is_stuck, ("request_timeout_s=0.05",), RunState.DONE, False),
        (meets_a_burst_of_503, (), RunState.DONE, True),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_trials_that_go_wrong(tmp_path, mode, during, options, state, is_exact):
    bench = Bench(tmp_path, mode, during=during)
    assert await bench.ends(*options) is state
    assert bench.last_event()["state"] == state
    last = records(tmp_path / "run/metrics.jsonl")[-1] if (tmp_path / "run/metrics.jsonl").exists() else {}
    if is_exact:
        assert set(groups_trained(tmp_path / "run").values()) == {1}
        assert mode != "synchronous" or bench.weights() == (await unbroken(tmp_path)).weights()
    elif state is RunState.DONE:
        assert (
            last["tasks/quarantined"] == 1
            and "say-1 is left out from now on: 2 groups" in bench.text.getvalue()
        )
        graded = [
            line
            for path in (tmp_path / "run/rollouts").glob("step*")
            for line in records(path)
            if line["task"] == "say-1"
        ]
        assert graded and all("reward" not in line for line in graded), "a trial that was lost is no reward"


# What happens to calls on the back end.


def once(name, number, do):
    """A fault at the `number`-th call of `name`, once."""
    state = {"left": number}

    async def calls(bench, called):
        if called == name:
            state["left"] -= 1
            if state["left"] == 0:
                await do(bench)

    return calls


async def answers_503(bench):
    raise server_error()


async def is_lost(bench):
    raise tinker.RequestFailedError(
        "the future is gone", request_id="r", category=tinker.RequestErrorCategory.Server
    )


async def never_answers(bench):
    await for_ever()


async def restarts(bench):
    bench.is_gone = True
    await for_ever()


CALLS = [
    (name, 3, do)
    for name in ("forward_backward", "optim_step", "policy")
    for do in (answers_503, is_lost, never_answers, restarts)
]
CALLS += [("save", 2, do) for do in (answers_503, never_answers, restarts)]


@pytest.mark.parametrize(("name", "number", "do"), CALLS, ids=lambda value: getattr(value, "__name__", None))
async def test_calls_that_go_wrong_once_change_nothing(tmp_path, mode, name, number, do):
    if mode != "synchronous":
        number = 2  # which groups make a step is a matter of time, and a step of equal rewards asks for no gradient
    bench = Bench(tmp_path, mode, calls=once(name, number, do))
    assert await bench.ends() is RunState.DONE
    whole = await assert_whole(bench)
    assert whole is None or bench.num_started == whole.num_started, "nothing was played twice"
    assert "server lost: " in bench.text.getvalue()


@pytest.mark.parametrize("do", [answers_503, never_answers, restarts], ids=lambda do: do.__name__)
@pytest.mark.parametrize("name", ["optim_step", "save"])
async def test_calls_that_always_go_wrong_end_the_run(tmp_path, mode, name, do):
    async def calls(bench, called):
        if called == name:
            await do(bench)

    bench = Bench(tmp_path, mode, calls=calls)
    assert await bench.ends("request_timeout_s=0.2") is RunState.SERVER_LOST
    assert bench.last_event()["state"] == "server_lost" and bench.text.getvalue().count("server lost") <= 3
    again = Bench(tmp_path, mode)
    assert await again.ends() is RunState.DONE
    await assert_whole(again)


# What happens to the disk and the process.


@pytest.mark.parametrize(
    "full",
    [
        "metrics.jsonl",
        "checkpoints.jsonl",
        "journal.jsonl",
        "step_000003.jsonl",
        "eval_000002.jsonl",
        ".step_000002.jsonl.new",
    ],
)
async def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(tmp_path, monkeypatch, mode, full):
    real_write, real_fsync, left = os.write, os.fsync, {"journal.jsonl": 30, "metrics.jsonl": 3}.get(full, 1)

    def is_full(descriptor):
        nonlocal left
        left -= os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{full}")
        return left <= 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{full}")

    def write(descriptor, data):
        return real_write(descriptor, data[:5]) if is_full(descriptor) else real_write(descriptor, data)

    def fsync(descriptor):
        if full.startswith(".") and is_full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    bench = Bench(tmp_path, mode)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", fsync)
        assert await bench.ends() is RunState.STORAGE
    again = Bench(tmp_path, mode)
    assert await again.ends() is RunState.DONE
    await assert_whole(again)


@pytest.mark.parametrize("number", [0, 3, 5, 9, 14, 17, 24, 30])
async def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path, mode, number):
    waiting = asyncio.Event()

    async def hang(bench, trial, policy):
        if bench.num_started > number:
            waiting.set()
            await for_ever()

    bench = Bench(tmp_path, mode, during=hang)
    running = asyncio.ensure_future(bench.go())
    await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, DEADLINE_S)
    assert bench.open_sandboxes == 0 and asyncio.all_tasks() == {asyncio.current_task()}
    assert bench.last_event()["state"] == "interrupted"
    again = Bench(tmp_path, mode)
    assert await again.ends() is RunState.DONE
    await assert_whole(again)


async def test_a_run_whose_every_task_is_quarantined_stops(tmp_path, mode):
    async def lost(bench, trial, policy):
        return (
            failure(trial.task.id, FailureKind.VERIFIER, "no reward file")
            if trial.task.id.startswith("say")
            else None
        )

    bench = Bench(tmp_path, mode, during=lost)
    with pytest.raises(
        TrainerError,
        match=r"every training task is quarantined; none of .* failed by verifier, e\.g\. no reward file",
    ):
        await asyncio.wait_for(bench.go("batch_size=1", "max_failure_rate=1"), DEADLINE_S)
