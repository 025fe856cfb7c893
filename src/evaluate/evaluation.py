"""Held-out tasks through the same rollouts as training; nothing of them is ever trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from src.core.trajectory import Task, TrajectoryGroup
from src.evaluate.eval_stats import Estimate, Tally, mean_rate, pass_rates
from src.evaluate.failure_patterns import pattern_counts
from src.learning.metrics import SOLVED, by_environment, held_out_metrics
from src.policy.sampling_policy import Policy
from src.rollouts.group_rollout import RolloutPlan, Rollouts, TimedGroup, require_some_graded


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What was found out about some of the tasks: all of them, or those of a domain."""

    rates: dict[
        str, Estimate
    ]  # pass_at_<k>, pass_hat_<k>, after the part of the grading that counts where only a part does
    floor: Estimate | None  # what doing nothing solves; None where nobody can say
    patterns: dict[str, int]  # how many failed trials show which
    num_failed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the held-out tasks with the weights after `step` steps."""

    step: int
    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    whole: Block
    domains: dict[str, Block]  # empty where tasks name no domain and form no families
    floors: dict[str, float]  # by task

    @property
    def num_solved(self) -> int:
        return sum(reward >= SOLVED for group in self.groups for reward in group.rewards)

    @property
    def num_graded(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def success_rate(self) -> float:
        return self.num_solved / self.num_graded

    def without_tokens(self) -> Evaluation:
        """For those who compare rewards later: the tokens of its trials are as many as a batch's."""
        return replace(self, groups=[_without_tokens(group) for group in self.groups])


async def evaluate(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    policy: Policy,
    plan: RolloutPlan,
    *,
    on_group: Callable[[TimedGroup], None],
) -> Evaluation:
    """Roll out the tasks as `plan` says and estimate success. TooManyFailuresError if no trial could be graded."""
    groups = [timed.group for timed in await rollouts.groups(tasks, policy, plan, on_group)]
    require_some_graded(groups, plan)
    floors = await rollouts.floors(tasks)
    whole = block_of(groups, floors, group_size=plan.group_size)
    domains = {
        name: block_of(own, floors, group_size=plan.group_size)
        for name, own in by_environment(groups).items()
    }
    metrics = held_out_metrics(groups, group_size=plan.group_size) | block_metrics("test", whole)
    for name, block in domains.items():
        metrics |= block_metrics(f"test/env/{name}", block)
    return Evaluation(
        step=plan.step, groups=groups, metrics=metrics, whole=whole, domains=domains, floors=floors
    )


def _without_tokens(group: TrajectoryGroup) -> TrajectoryGroup:
    return replace(
        group,
        trajectories=[replace(trajectory, turns=[], conversation=[]) for trajectory in group.trajectories],
    )


def block_of(groups: Sequence[TrajectoryGroup], floors: Mapping[str, float], *, group_size: int) -> Block:
    """A partial grading gives its name to the rates: nobody shall take them for the benchmark's."""
    rates = pass_rates([tally(group) for group in groups], group_size=group_size)
    partial = "".join(f"{name}_" for name in sorted({group.task.grading for group in groups} - {""}))
    solved = [float(floors[group.task.id] >= SOLVED) for group in groups if group.task.id in floors]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return Block(
        rates={partial + name: rate for name, rate in rates.items()},
        floor=mean_rate(solved, num_trials=len(solved)) if solved else None,
        patterns=pattern_counts(trajectories),
        num_failed=sum(trajectory.reward < SOLVED for trajectory in trajectories),
    )


def tally(group: TrajectoryGroup) -> Tally:
    """What could not be graded is in neither number."""
    return Tally(solved=sum(reward >= SOLVED for reward in group.rewards), graded=len(group.rewards))


def block_metrics(prefix: str, block: Block) -> dict[str, float]:
    """`<prefix>/pass_at_4` and the ends of its interval, `<prefix>/floor`, and `<prefix>/failures/<pattern>` as shares of failed trials."""
    values: dict[str, float] = {}
    for name, rate in block.rates.items():
        values |= {
            f"{prefix}/{name}": rate.value,
            f"{prefix}/{name}_low": rate.low,
            f"{prefix}/{name}_high": rate.high,
        }
    if block.floor is not None:
        values[f"{prefix}/floor"] = block.floor.value
    return values | {
        f"{prefix}/failures/{name}": count / max(1, block.num_failed)
        for name, count in block.patterns.items()
    }
