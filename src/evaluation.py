"""Held-out tasks through the same rollouts as training; nothing of them is ever trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.estimates import Estimate, Tally, pass_rates
from src.metrics import SOLVED, held_out_metrics
from src.policy import Policy
from src.rollouts import FinishedGroup, RolloutPlan, Rollouts, require_some_graded
from src.trajectory import Task, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    group_size: int
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One pass over the held-out tasks with the weights after `step` steps."""

    step: int
    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    rates: dict[str, Estimate]  # pass_at_<k>, pass_hat_<k>

    @property
    def num_solved(self) -> int:
        return sum(reward >= SOLVED for group in self.groups for reward in group.rewards)

    @property
    def num_graded(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def success_rate(self) -> float:
        return self.num_solved / self.num_graded


async def evaluate(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    policy: Policy,
    settings: EvaluationSettings,
    *,
    step: int,
    directory: Path,
    on_group: Callable[[FinishedGroup], None],
) -> Evaluation:
    """RubbleError when not one trial could be graded."""
    plan = RolloutPlan(step=step, purpose="eval", group_size=settings.group_size, temperature=settings.temperature, directory=directory)
    groups = await rollouts.play(tasks, policy, plan, on_group)
    require_some_graded(groups, plan)
    rates = pass_rates([tally(group) for group in groups], group_size=settings.group_size)
    metrics = held_out_metrics(groups, group_size=settings.group_size) | rate_metrics(rates)
    return Evaluation(step=step, groups=groups, metrics=metrics, rates=rates)


def tally(group: TrajectoryGroup) -> Tally:
    """What could not be graded is in neither number."""
    return Tally(solved=sum(reward >= SOLVED for reward in group.rewards), graded=len(group.rewards))


def rate_metrics(rates: Mapping[str, Estimate]) -> dict[str, float]:
    """`test/pass_at_4` and the ends of its interval."""
    values = {f"test/{name}": rate.value for name, rate in rates.items()}
    for name, rate in rates.items():
        values |= {f"test/{name}_low": rate.low, f"test/{name}_high": rate.high}
    return values
