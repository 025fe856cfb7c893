"""The schedule of tasks, and the pipeline that rolls out groups in the order of the schedule.

docs/staleness.md explains the rules and the alternatives.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.records.journal import GroupKey
from src.rollouts.group_rollout import TimedGroup
from src.rollouts.options import PipelineOptions, ScheduleOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The tasks of one step.

    `step` counts from 1 over the whole run. Step n updates the weights from policy version n - 1 to n.
    """

    step: int
    epoch: int
    tasks: list[Task]


def schedule(tasks: Sequence[Task], options: ScheduleOptions) -> list[Batch]:
    """Return every batch of the run.

    The result depends only on the tasks and the options, so a resumed run has the same batches. Without a
    domain mixture, a batch never contains tasks of two epochs, so the last batch of an epoch may be smaller.
    """
    if options.domain_shares:
        return mixed(tasks, options)
    batches: list[Batch] = []
    for epoch in range(options.n_epochs):
        if options.max_steps is not None and len(batches) >= options.max_steps:
            break
        order = epoch_order(tasks, seed=options.seed, epoch=epoch)
        for batch in batched(order, options.batch_size):
            batches.append(Batch(step=len(batches) + 1, epoch=epoch, tasks=list(batch)))
    return batches[: options.max_steps]


def mixed(tasks: Sequence[Task], options: ScheduleOptions) -> list[Batch]:
    """Return the batches with a domain mixture: as many as without a mixture, all of the same size.

    Each domain has its share of the groups. A domain repeats its tasks independently of the other domains.
    """
    domains = {
        domain: [task for task in tasks if task.domain == domain]
        for domain in sorted({task.domain for task in tasks})
    }
    require_shares(domains, options)
    waiting: dict[str, list[Task]] = {domain: [] for domain in domains}
    taken: Counter[str] = Counter()
    epochs: Counter[str] = Counter()

    def draw(batch: Sequence[Task]) -> Task:
        """Return the next task that is not in the batch, from the domain that is furthest below its share."""
        open_domains = [
            name for name, members in domains.items() if any(task not in batch for task in members)
        ]
        domain = max(
            open_domains, key=lambda name: options.domain_shares[name] * (taken.total() + 1) - taken[name]
        )
        taken[domain] += 1
        if all(task in batch for task in waiting[domain]):
            waiting[domain] += epoch_order(domains[domain], seed=options.seed, epoch=epochs[domain])
            epochs[domain] += 1
        task = next(task for task in waiting[domain] if task not in batch)
        waiting[domain].remove(task)
        return task

    batches: list[Batch] = []
    steps_per_epoch = -(-len(tasks) // options.batch_size)
    num_steps = options.n_epochs * steps_per_epoch
    for number in range(num_steps if options.max_steps is None else min(num_steps, options.max_steps)):
        batch: list[Task] = []
        while len(batch) < min(options.batch_size, len(tasks)):
            batch.append(draw(batch))
        batches.append(Batch(step=number + 1, epoch=number // steps_per_epoch, tasks=batch))
    return batches


def require_shares(domains: Mapping[str, Sequence[Task]], options: ScheduleOptions) -> None:
    """Raise ConfigError if a domain has no share, a share has no domain, or a domain has too few tasks.

    A domain needs at least as many tasks as its share of a batch.
    """
    if domains.keys() != options.domain_shares.keys():
        raise ConfigError(
            f"domain_mixture names the domains {', '.join(sorted(options.domain_shares))}, but the training "
            f"tasks have the domains {', '.join(domains)}; give a share to each of the latter"
        )
    for domain, members in domains.items():
        num_needed = options.domain_shares[domain] * options.batch_size
        if len(members) < num_needed:
            raise ConfigError(
                f"domain_mixture: {domain} has {len(members)} tasks, fewer than its share of a batch, "
                f"{num_needed:g}; lower its share or batch_size"
            )


def epoch_order(tasks: Sequence[Task], *, seed: int, epoch: int) -> list[Task]:
    """Return the tasks in an order that depends only on their ids, the seed and the epoch."""
    order = sorted(tasks, key=lambda task: task.id)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """A group in the schedule: its step and its task."""

    step: int
    task: Task

    @property
    def key(self) -> GroupKey:
        return self.step, self.task.id


class Pipeline:
    """Rolls out groups in the order of the schedule. Steps take the groups in the order in which they end.

    With `max_staleness=0`, only the groups of the current step are rolled out. Otherwise up to
    `max_groups_in_flight` groups are rolled out at once, also during updates, each turn is sampled with the
    newest weights, and a step does not wait for slow groups. If
    training is slower than the rollouts, fewer groups are rolled out at once, because each group must be
    trained before its tokens are too stale.
    """

    def __init__(
        self,
        scheduled: Iterable[Scheduled],
        roll_out: Callable[[Scheduled], Awaitable[TimedGroup]],
        options: PipelineOptions,
        *,
        is_left_out: Callable[[Task], bool],
    ) -> None:
        self._ahead = deque(scheduled)
        self._roll_out = roll_out
        self._options = options
        self._is_left_out = is_left_out
        self._rolling: set[asyncio.Task[TimedGroup]] = set()
        self._waiting: deque[asyncio.Task[TimedGroup]] = deque()  # in the order in which they ended
        self._ended = asyncio.Event()
        self._step = 0
        self._num_taken = 0
        self._durations_s: deque[float] = deque(maxlen=2 * options.batch_size)
        self._update_began = 0.0
        self._update_s: float | None = None  # duration of the last update

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Cancel all rollouts and wait for their end."""
        self._ahead.clear()  # a group that has just ended must not start another group
        rolling = list(self._rolling)
        for rollout in rolling:
            rollout.cancel()
        await asyncio.gather(*rolling, *self._waiting, return_exceptions=True)

    async def take(self, step: int) -> TimedGroup | None:
        """Wait for a finished group that no step has taken, and return the one that ended first.

        Returns None if the schedule has no more groups for `step`. Raises the error of a failed rollout, and
        CancelledError if the rollout was cancelled.
        """
        self._step = step
        self._start_groups()
        while not self._waiting:
            if not self._rolling:
                return None
            self._ended.clear()
            await self._ended.wait()
        self._num_taken += 1
        return self._waiting.popleft().result()

    def update_begins(self) -> None:
        self._update_began = asyncio.get_running_loop().time()

    def update_ended(self) -> None:
        """Record the duration of the update, and start further groups."""
        self._update_s = asyncio.get_running_loop().time() - self._update_began
        self._start_groups()

    def metrics(self) -> dict[str, float]:
        return {
            "async/groups_in_flight": float(len(self._rolling)),
            "async/groups_waiting": float(len(self._waiting)),
        }

    def _start_groups(self) -> None:
        while self._ahead and len(self._rolling) < self._admission_limit():
            if self._options.max_staleness == 0 and self._ahead[0].step > self._step:
                return
            scheduled = self._ahead.popleft()
            if not self._is_left_out(scheduled.task):
                rollout = asyncio.create_task(self._timed(scheduled))
                self._rolling.add(rollout)
                rollout.add_done_callback(self._on_end)

    def _admission_limit(self) -> int:
        """Return the number of groups that may be rolled out at once.

        The limit is `max_groups_in_flight`. If `max_staleness` is above 0, the smaller of this limit and a
        second limit applies, so that groups are not too old when they are trained. A group that ends during
        an update while n other groups wait is trained `1 + n // batch_size` updates later. Therefore at most
        `max_staleness` batches of groups should end during one update. The second limit is

            (max_staleness + 1) * batch_size - waiting groups - taken groups    until the first update ends
            (max_staleness + s) * batch_size - waiting groups                   afterwards

        where s is half the number of updates that fit into the mean duration of a group, rounded down. If a
        group takes as long as several updates, only a part of the groups ends during one update. The
        term s therefore allows further groups.
        """
        options = self._options
        limit = options.max_groups_in_flight or 2 * options.batch_size
        if options.max_staleness == 0:
            return limit
        if self._update_s is None:
            num_fresh = (options.max_staleness + 1) * options.batch_size - self._num_taken
        else:
            mean_duration_s = statistics.fmean(self._durations_s or [0.0])
            num_slow_batches = int(mean_duration_s / max(self._update_s, 1e-9) / 2)
            num_fresh = (options.max_staleness + num_slow_batches) * options.batch_size
        return min(limit, num_fresh - len(self._waiting))

    async def _timed(self, scheduled: Scheduled) -> TimedGroup:
        loop = asyncio.get_running_loop()
        started = loop.time()
        finished = await self._roll_out(scheduled)
        self._durations_s.append(loop.time() - started)
        return finished

    def _on_end(self, rollout: asyncio.Task[TimedGroup]) -> None:
        self._rolling.discard(rollout)
        self._waiting.append(rollout)
        self._ended.set()
        if not rollout.cancelled() and rollout.exception() is None:
            self._start_groups()
