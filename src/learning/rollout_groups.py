"""The groups of one batch as they were rolled out, and the quantities that metrics are computed from."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from src.core.trajectory import Task, Trajectory, TrajectoryGroup
from src.learning.datums import merge_turns
from src.learning.filters import is_constant

SOLVED = 1.0  # a trial with at least this reward is a success


class RolloutGroups:
    """The groups of one batch as they were rolled out, before any filter."""

    def __init__(self, groups: Sequence[TrajectoryGroup], *, group_size: int) -> None:
        self.groups = groups
        self.group_size = group_size
        self.trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.rewards = [trajectory.reward for trajectory in self.trajectories]
        self.rewards_P_G = [group.rewards for group in groups if group.trajectories]
        self.failures = Counter(failure.kind for group in groups for failure in group.failures)
        self.zero_reasons = Counter(trajectory.zero_reason for trajectory in self.trajectories)
        self.stop_reasons = Counter(trajectory.stop_reason for trajectory in self.trajectories)
        self.turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]

    @property
    def versions(self) -> list[int]:
        return [turn.policy_version for turn in self.turns] or [0]

    @property
    def judged(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if "judge_bonus" in trajectory.metrics]


def by_domain_or_task_type(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """Return the graded groups by domain or task type.

    The result is empty if no task names a domain and each task type has one group.
    """
    graded = [group for group in groups if group.trajectories]
    members: defaultdict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in graded:
        members[domain_or_task_type(group.task)].append(group)
    is_split = len(members) < len(graded) or any(group.task.domain for group in graded)
    return dict(sorted(members.items())) if is_split else {}


def domain_or_task_type(task: Task) -> str:
    """Return the name of a task in metrics: its domain or task type, with `_` in place of slashes.

    The name `all` becomes `all_`, because `test/env/all/...` are the metrics of all held-out tasks.
    """
    name = (task.domain or task_type(task.id)).replace("/", "_") or "unknown"
    return "all_" if name == "all" else name


def task_type(task_id: str) -> str:
    """Return the task type: the id of a task without its directory and number.

    >>> task_type("quickstart/count-lines-03")
    'count-lines'
    """
    return re.sub(r"[-_]?\d+$", "", task_id.rpartition("/")[2]) or task_id


def signal_metrics(rewards_P_G: Sequence[Sequence[float]], *, group_size: int) -> dict[str, float]:
    """Return the metrics of the learning signal of groups, as SkyRL's fork `fleet` defines them.

    A pass is any reward above 0. Variances are population variances of groups of two or more trials: one
    success among four gives 0.1875, and two give the maximum, 0.25.

    >>> signal_metrics([[1, 0, 0, 0], [1, 1, 1, 1]], group_size=4)["variance_per_prompt"]
    0.09375
    """
    groups = [rewards for rewards in rewards_P_G if len(rewards) > 1]
    # Because of rounding, `np.var` of equal rewards such as 0.1 can be above 0.
    variances = [0.0 if is_constant(rewards) else float(np.var(rewards)) for rewards in groups]
    positive = [reward for rewards in rewards_P_G for reward in rewards if reward > 0]
    return {
        f"pass_at_{group_size}": float(np.mean([max(rewards) > 0 for rewards in rewards_P_G])),
        "variance_per_prompt": float(np.mean(variances)) if variances else 0.0,
        "signal_ratio": float(np.mean([variance > 0 for variance in variances])) if variances else 0.0,
        "mean_positive_reward": float(np.mean(positive)) if positive else 0.0,
    }


def parse_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the parse failure rate and the number of repaired tool calls.

    The rate is the number of answers that could not be parsed, divided by the number of answers with a tool
    call. If an environment does not count the answers with a tool call, the divisor is the number of turns.
    """
    counted = [trajectory for trajectory in trajectories if "parse_failures" in trajectory.metrics]
    if not counted:
        return {}
    failures = sum(trajectory.metrics["parse_failures"] for trajectory in counted)
    num_answers = sum(
        trajectory.metrics.get("parse_attempts", len(trajectory.turns)) for trajectory in counted
    )
    recovered = sum(trajectory.metrics.get("parse_recovered", 0.0) for trajectory in counted)
    return {"reward/parse_failure_rate": failures / max(1, num_answers), "parse/recovered": float(recovered)}


def trajectory_metrics(rollouts: RolloutGroups) -> dict[str, list[float]]:
    """Return the values of each entry of `Trajectory.metrics`, by name."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in rollouts.trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(value)
    return dict(sorted(values.items()))


def aggregate(name: str, values: Sequence[float]) -> float:
    """Reduce the values of an entry of `Trajectory.metrics` to one number. As in SkyRL, the end of `name`
    selects the mean, the minimum or the maximum. For any other name, the values are summed.

    >>> [aggregate(name, [1, 3]) for name in ("score_mean", "length_avg", "score_min", "score_max", "calls")]
    [2.0, 2.0, 1.0, 3.0, 4.0]
    """
    if name.endswith(("avg", "mean")):
        return float(np.mean(values))
    if name.endswith("min"):
        return float(min(values))
    return float(max(values) if name.endswith("max") else sum(values))


def num_response_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens after the first prompt of each chain (`merge_turns`), in total."""
    return sum(
        len(chain[-1].prompt_ids) + len(chain[-1].completion_ids) - len(chain[0].prompt_ids)
        for chain in merge_turns(trajectory.turns)
    )


def success_rate(rewards: Sequence[float]) -> float | None:
    """Return the share of rewards that count as a success; None without rewards."""
    return float(np.mean([reward >= SOLVED for reward in rewards])) if rewards else None
