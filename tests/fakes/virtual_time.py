"""Runs the real trainer in virtual time: the clock advances directly to the next timer.

Hours of training take seconds, and the runs are deterministic.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from src.core import process
from src.loop.connection import Dependencies
from src.policy.sampling_policy import SampleRequest
from tests.fakes.backend import BanditBackend, BanditTrainingClient
from tests.fakes.run import FakeRun, groups_trained
from tests.fakes.trials import FakeTasks, task, trajectory

TURNS = 20  # per trial
SLOWEST = 0.1  # share of the tasks in `Result.slowest`


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeps advance a virtual clock. While it runs, `run_in_executor` and `start_daemon`
    call their function directly, without a thread.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_AdvancingSelector(self))

    def time(self) -> float:
        return self._now

    def run_forever(self) -> None:
        with mock.patch.object(process, "start_daemon", lambda call: call()):
            super().run_forever()

    def run_in_executor(self, executor, func, *args):
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _AdvancingSelector(selectors.DefaultSelector):
    """Advances the virtual clock by the timeout instead of waiting."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("the run waits for an event that never occurs")
        self._loop._now += max(0.0, timeout)
        return super().select(0)


def in_virtual_time[**P](test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """Decorate an async test so that it runs in a `VirtualTimeLoop`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


@dataclass(frozen=True)
class SlowFuture[T]:
    """A future of the server that is done at the virtual time `until`, in seconds."""

    future: Awaitable[T]
    until: float

    def __await__(self) -> Generator[object, None, T]:
        yield from asyncio.sleep(max(0.0, self.until - asyncio.get_running_loop().time())).__await__()
        return (yield from self.future.__await__())


class SlowTrainingClient(BanditTrainingClient):
    """Trains on `num_datums` datums in `train_s` virtual seconds.

    `ages` contains the age of every trained token, in optimizer updates.
    """

    def __init__(self, train_s: float, num_datums: int) -> None:
        super().__init__()
        self.ages: list[int] = []
        self._seconds_per_datum = train_s / num_datums
        self._free_at = 0.0
        self._version = 0

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        future = super().forward_backward(data, loss_fn, loss_fn_config)
        for datum in data:
            tokens = datum.model_input.to_ints()
            for position, advantage in enumerate(datum.loss_fn_inputs["advantages"].to_numpy()):
                if advantage:
                    self.ages.append(self._version - (tokens[position] - VERSION_TOKEN_OFFSET))
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + self._seconds_per_datum * len(data)
        return SlowFuture(future, self._free_at)

    def optim_step(self, adam):
        self._version += 1
        return SlowFuture(super().optim_step(adam), self._free_at)


VERSION_TOKEN_OFFSET = 100
"""The last token of a prompt is VERSION_TOKEN_OFFSET plus the version of the policy that samples after it.
`SlowTrainingClient` reads the version from this token and computes the age of the sampled token."""


@dataclass(kw_only=True)
class Result:
    """The outcome of a simulated run."""

    minutes_per_step: float
    num_steps: int
    rolled_out: Counter[str] = field(default_factory=Counter)  # task -> number of finished groups
    trained: Counter[str] = field(default_factory=Counter)  # task -> number of trained groups
    slowest: set[str] = field(default_factory=set)  # the tasks with the longest durations
    ages: list[int] = field(default_factory=list)  # ages of trained tokens, in updates
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def num_discarded(self) -> int:
        """The number of groups that were rolled out but contributed no token to the training."""
        return sum((self.rolled_out - self.trained).values()) + int(
            sum(line.get("staleness/masked_trajectories", 0) for line in self.metrics)
        )

    @property
    def slowest_trained(self) -> float:
        """The share of the tasks in `slowest` that were trained."""
        return sum(self.trained[name] > 0 for name in self.slowest) / len(self.slowest)


def lognormal_minutes(median: float, sigma: float) -> Callable[[random.Random], float]:
    return lambda rng: median * math.exp(rng.gauss(0.0, sigma))


def simulate(
    path: Path,
    *options: str,
    minutes: Callable[[random.Random], float],
    train_minutes: float,
    num_steps: int,
    batch_size: int,
    seed: int = 0,
    turns: int = TURNS,
) -> Result:
    """Run the real trainer on `num_steps * batch_size` tasks with one trial each.

    `minutes` draws the duration of a trial in minutes. All turns of a trial are equally long. Training on a
    batch takes `train_minutes`.
    """
    rng = random.Random(seed)
    names = [f"task-{number}" for number in range(num_steps * batch_size)]
    duration_s = {name: 60 * minutes(rng) for name in names}
    rolled_out: Counter[str] = Counter()

    async def run_trial(trial, policy):
        trial_turns = []
        for _ in range(turns):
            await asyncio.sleep(duration_s[trial.task.id] / turns)
            version = policy.version
            prompt = [
                *(trial_turns[-1].prompt_ids + trial_turns[-1].completion_ids if trial_turns else []),
                VERSION_TOKEN_OFFSET + version,
            ]
            turn = await policy.sample(
                SampleRequest(
                    prompt_ids=prompt, max_tokens=1, temperature=1.0, seed=trial.seed + len(trial_turns)
                )
            )
            assert turn.policy_version == version
            trial_turns.append(turn)
        if trial.directory.name.startswith("step"):
            rolled_out[trial.task.id] += 1
        return trajectory(trial.task.id, 1.0, trial_turns, name=f"{trial.task.id}-{trial.seed}")

    backend, client = BanditBackend(), SlowTrainingClient(60 * train_minutes, batch_size)
    backend.training_client = client
    source = FakeTasks(train=[task(name) for name in names], run_trial=run_trial)
    required = [
        "tasks_dir=t",
        "eval_split=0",
        "n_parallel_envs=10000",
        "group_size=1",
        "singleton_advantage=raw",
        "save_every=0",
    ]
    required += [
        "max_failure_rate=1",
        "heartbeat_timeout_s=1e6",
        "request_timeout_s=1e6",
        "trial_timeout_s=1e9",
    ]
    fake_run = FakeRun(path, lambda config: Dependencies(source=source, backend=backend))
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(fake_run.go(*required, f"batch_size={batch_size}", *options))
        elapsed_s = loop.time()
    finally:
        loop.close()
    by_duration = sorted(names, key=lambda name: duration_s[name])
    return Result(
        minutes_per_step=elapsed_s / 60 / num_steps,
        num_steps=num_steps,
        rolled_out=rolled_out,
        trained=Counter(name for _, name in groups_trained(path).elements()),
        slowest=set(by_duration[-max(1, int(len(names) * SLOWEST)) :]),
        ages=client.ages,
        metrics=fake_run.lines("metrics.jsonl"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The random parameters of a simulated run."""

    max_staleness: int
    stream_groups: bool
    batch_size: int
    groups_in_flight: int
    sigma: float
    train_minutes: float
    turns: int
    seed: int

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        batch_size = rng.randint(1, 4)
        return cls(
            max_staleness=rng.randint(1, 4),
            stream_groups=rng.random() < 0.5,
            batch_size=batch_size,
            groups_in_flight=rng.randint(batch_size, 4 * batch_size),
            sigma=rng.uniform(0, 1.6),
            train_minutes=math.exp(rng.uniform(-3, 4)),
            turns=rng.randint(1, 6),
            seed=seed,
        )

    def run(self, path: Path) -> Result:
        options = [f"max_staleness={self.max_staleness}", f"max_groups_in_flight={self.groups_in_flight}"]
        if self.stream_groups:
            options += ["stream_groups=true", "loss_reduction=sequence_mean"]
        return simulate(
            path,
            *options,
            minutes=lognormal_minutes(10, self.sigma),
            train_minutes=self.train_minutes,
            num_steps=6,
            batch_size=self.batch_size,
            seed=self.seed,
            turns=self.turns,
        )

    def faults(self, result: Result) -> list[str]:
        """Return the violated rules: no token exceeds the staleness limit, and every group is trained exactly
        once.
        """
        violations = []
        if max(result.ages, default=0) > self.max_staleness:
            violations.append(f"trained a token {max(result.ages)} updates old")
        if (
            set(result.trained.values()) != {1}
            or result.trained != result.rolled_out
            or len(result.trained) != 6 * self.batch_size
        ):
            violations.append("not every group was trained exactly once")
        return violations
