"""Evaluation of a policy on given tasks, with the rollout code of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from src.core.trajectory import Task, TrajectoryGroup
from src.evaluate.eval_stats import Estimate, Tally, mean_rate, pass_at_k, pass_rates
from src.evaluate.failure_patterns import pattern_counts
from src.learning.metrics import held_out_metrics
from src.learning.rollout_groups import SOLVED, by_domain_or_task_type
from src.policy.sampling_policy import Policy, TopPPolicy
from src.rollouts.group_rollout import RolloutPlan, Rollouts, TimedGroup, require_some_graded
from src.rollouts.run_events import RunEvents

MAX_DOMAINS = 5  # reports show each domain if there are 2 to MAX_DOMAINS domains


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection:
    """The results of all evaluated tasks, or of the evaluated tasks of one domain or task type."""

    rates: dict[str, Estimate]
    """The names are pass_at_<k> and pass_hat_<k>, with a prefix if the grading is partial (`section_of`)."""
    noop_success: Estimate | None  # the success rate of an agent that does nothing; None if it is unknown
    patterns: dict[str, int]  # number of failed trials that show each failure pattern
    num_failed: int  # graded trials that did not solve their task


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRewards:
    """The rewards of the graded trials of an evaluation after `step` training steps, by task."""

    step: int
    rewards: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The evaluation of the weights after `step` training steps. `src.evaluate` always sets `step` to 0."""

    step: int
    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    whole: EvalSection
    domains: dict[str, EvalSection]  # by domain or task type; empty if `by_domain_or_task_type` returns none
    noop_rewards: dict[str, float]  # by task: the reward of an agent that does nothing

    @property
    def num_solved(self) -> int:
        return sum(reward >= SOLVED for group in self.groups for reward in group.rewards)

    @property
    def num_graded(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)

    @property
    def success_rate(self) -> float:
        return self.num_solved / self.num_graded

    @property
    def task_rewards(self) -> TaskRewards:
        rewards = {group.task.id: group.rewards for group in self.groups}
        return TaskRewards(step=self.step, rewards=rewards)


async def evaluate(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    policy: Policy,
    plan: RolloutPlan,
    *,
    top_p: float,
    title: str,
    events: RunEvents,
) -> Evaluation:
    """Roll out all tasks and compute their rates. `title` names the evaluation in `events`.

    Raises TooManyFailuresError if no trial could be graded.
    """

    def on_group(timed: TimedGroup) -> None:
        events.group_finished(timed.group, duration_s=timed.duration_s)

    events.batch_started(title, num_groups=len(tasks), group_size=plan.group_size)
    timed_groups = await rollouts.groups(tasks, TopPPolicy(policy, top_p), plan, on_group)
    groups = [timed.group for timed in timed_groups]
    require_some_graded(groups, plan)
    noop_rewards = await rollouts.noop_rewards(tasks)
    whole = section_of(groups, noop_rewards, group_size=plan.group_size)
    domains: dict[str, EvalSection] = {}
    metrics = held_out_metrics(groups, group_size=plan.group_size) | section_metrics("test", whole)
    metrics |= reward_pass_rates("test/reward/avg_pass_at_", groups, group_size=plan.group_size)
    for name, members in by_domain_or_task_type(groups).items():
        domains[name] = section_of(members, noop_rewards, group_size=plan.group_size)
        metrics |= section_metrics(f"test/env/{name}", domains[name])
        prefix = f"test/env/{name}/reward/pass_at_"
        metrics |= reward_pass_rates(prefix, members, group_size=plan.group_size)
    return Evaluation(
        step=plan.step,
        groups=groups,
        metrics=metrics,
        whole=whole,
        domains=domains,
        noop_rewards=noop_rewards,
    )


def section_of(
    groups: Sequence[TrajectoryGroup], noop_rewards: Mapping[str, float], *, group_size: int
) -> EvalSection:
    """Return the results of `groups`.

    The name of a partial grading (`Task.grading`) is a prefix of the names of the rates.
    """
    rates = pass_rates([tally(group) for group in groups], group_size=group_size)
    part = "".join(f"{name}_" for name in sorted({group.task.grading for group in groups} - {""}))
    rewards = [noop_rewards[group.task.id] for group in groups if group.task.id in noop_rewards]
    solved = [float(reward >= SOLVED) for reward in rewards]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return EvalSection(
        rates={part + name: rate for name, rate in rates.items()},
        noop_success=mean_rate(solved, num_trials=len(solved)) if solved else None,
        patterns=pattern_counts(trajectories),
        num_failed=sum(trajectory.reward < SOLVED for trajectory in trajectories),
    )


def tally(group: TrajectoryGroup) -> Tally:
    """Count a group's solved and graded trials. Ungraded trials count in neither number."""
    return Tally(solved=sum(reward >= SOLVED for reward in group.rewards), graded=len(group.rewards))


def reward_pass_rates(prefix: str, groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """Return SkyRL's pass@k, which counts every reward above 0 as a pass, for each k below `group_size`.

    The value for k = `group_size` is missing, because `signal_metrics` (src/learning/metrics.py) computes it.
    Groups with fewer than k graded trials are left out.
    """
    tallies = [
        Tally(solved=sum(reward > 0 for reward in group.rewards), graded=len(group.rewards))
        for group in groups
    ]
    values = {k: [pass_at_k(t, k) for t in tallies if t.graded >= k] for k in range(1, group_size)}
    return {f"{prefix}{k}": fmean(rates) for k, rates in values.items() if rates}


def section_metrics(prefix: str, section: EvalSection) -> dict[str, float]:
    """Return the metrics of a section. Those of failure patterns are shares of the failed trials."""
    values: dict[str, float] = {}
    for name, rate in section.rates.items():
        values |= {
            f"{prefix}/{name}": rate.value,
            f"{prefix}/{name}_low": rate.low,
            f"{prefix}/{name}_high": rate.high,
        }
    if section.noop_success is not None:
        values[f"{prefix}/noop_success"] = section.noop_success.value
    return values | {
        f"{prefix}/failures/{name}": count / max(1, section.num_failed)
        for name, count in section.patterns.items()
    }
