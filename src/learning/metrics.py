"""Groups, batch and update -> dict[str, float], under the names of tinker-cookbook (progress, env, optim) and SkyRL (reward, generate)."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrajectoryGroup, ZeroReason
from src.learning.datums import merge_turns
from src.learning.examples import Example
from src.learning.filters import DropReason

TIMEOUTS = frozenset({StopReason.TIMEOUT, StopReason.AGENT_TIMEOUT})
SOLVED = 1.0  # the reward from which on a trial counts as a success

logger = logging.getLogger(__name__)


def group_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """Rewards, failures and lengths of one batch as it was played, before any filter."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failures = Counter(failure.kind for group in groups for failure in group.failures)
    metrics = {f"trials/failed/{kind}": float(failures[kind]) for kind in FailureKind}
    zeros = Counter(trajectory.zero_reason for trajectory in trajectories)
    metrics |= {f"trials/graded_zero/{reason}": float(zeros[reason]) for reason in ZeroReason}
    metrics["trials/ungraded"] = float(failures.total())
    metrics |= {
        "trials/total": float(len(trajectories) + failures.total()),
        "trials/graded": float(len(trajectories)),
    }
    metrics |= {
        f"rollouts/{name}": metrics[f"trials/{key}"]
        for name, key in (("total", "total"), ("valid", "graded"), ("invalid", "ungraded"))
    }
    metrics["generate/env_init_failures"] = float(failures[FailureKind.ENV_INIT_FAILED])
    metrics["generate/trajectory_timeouts"] = float(
        failures[FailureKind.TIMEOUT] + sum(trajectory.stop_reason in TIMEOUTS for trajectory in trajectories)
    )
    if not trajectories:
        return metrics
    metrics |= {f"env/all/{name}": value for name, value in success_split(groups).items()}
    return (
        metrics
        | reward_metrics(groups, group_size=group_size)
        | by_group(groups)
        | length_metrics(trajectories)
    )


def reward_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """SkyRL's reward metrics in fleet's definitions, for all groups and, where tasks form families, for each family.

    Upstream's mean of `max(r, 0)` over all trials has a name of its own, since fleet's `mean_positive_reward` is over positive rewards.
    """
    graded = [group.rewards for group in groups if group.trajectories]
    rewards = [reward for group in graded for reward in group]
    metrics = {
        "env/all/reward/total": float(np.mean(rewards)),
        "env/all/success": float(np.mean([reward >= SOLVED for reward in rewards])),
        "reward/avg_raw_reward": float(np.mean(rewards)),
        "reward/positive_rate": float(np.mean([reward > 0 for reward in rewards])),
        "train/min_reward": float(min(rewards)),
        "train/max_reward": float(max(rewards)),
        "reward/zero_reward_rate": float(np.mean([reward == 0 for reward in rewards])),
        "reward/mean_clipped_at_zero": float(np.mean([max(reward, 0.0) for reward in rewards])),
    }
    for name, value in signal_metrics(graded, group_size=group_size).items():
        metrics[f"reward/avg_{name}" if name.startswith("pass_at_") else f"reward/{name}"] = value
    for family_name, own in by_environment(groups).items():
        signals = signal_metrics([group.rewards for group in own], group_size=group_size)
        metrics |= {f"reward/{family_name}/{name}": value for name, value in signals.items()}
    return metrics


def by_environment(groups: Sequence[TrajectoryGroup]) -> dict[str, list[TrajectoryGroup]]:
    """The graded groups, by domain or family. Nothing where tasks name no domain and each is a family of its own."""
    graded = [group for group in groups if group.trajectories]
    found: defaultdict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in graded:
        found[environment(group.task)].append(group)
    is_split = len(found) < len(graded) or any(group.task.domain for group in graded)
    return dict(sorted(found.items())) if is_split else {}


def signal_metrics(rewards_P_G: Sequence[Sequence[float]], *, group_size: int) -> dict[str, float]:
    """What groups offer to learn from: pass is any reward above 0, variances are population variances of groups of 2 or more.

    One success among four gives a variance of 0.1875, two give the largest, 0.25.

    >>> signal_metrics([[1, 0, 0, 0], [1, 1, 1, 1]], group_size=4)["variance_per_prompt"]
    0.09375
    """
    variances = [float(np.var(group)) for group in rewards_P_G if len(group) > 1]
    positive = [reward for group in rewards_P_G for reward in group if reward > 0]
    return {
        f"pass_at_{group_size}": float(np.mean([max(group) > 0 for group in rewards_P_G])),
        "variance_per_prompt": float(np.mean(variances)) if variances else 0.0,
        "signal_ratio": float(np.mean([variance > 0 for variance in variances])) if variances else 0.0,
        "mean_positive_reward": float(np.mean(positive)) if positive else 0.0,
    }


def success_split(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Success apart for tasks that take a writing action and for those that an agent who does nothing may solve."""
    found: dict[str, float] = {}
    for name, writes in (("success_write", True), ("success_nowrite", False)):
        rewards = [reward for group in groups if group.task.has_writes is writes for reward in group.rewards]
        found |= {name: float(np.mean([reward >= SOLVED for reward in rewards]))} if rewards else {}
    return found


def by_group(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The shares of groups whose rewards differ, are all good (>= 0.5), or are all bad."""
    graded = [group.rewards for group in groups if group.trajectories]
    mixed = sum(len(set(rewards)) > 1 for rewards in graded)
    good = sum(len(set(rewards)) == 1 and rewards[0] >= 0.5 for rewards in graded)
    shares = {"frac_mixed": mixed, "frac_all_good": good, "frac_all_bad": len(graded) - mixed - good}
    return {f"env/all/by_group/{name}": count / len(graded) for name, count in shares.items()}


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, sampled tokens, endings, and the mean of whatever the environment measured."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = [sum(len(turn.completion_ids) for turn in trajectory.turns) for trajectory in trajectories]
    versions = [turn.policy_version for turn in turns] or [0]
    metrics = {
        "env/all/turns": len(turns) / len(trajectories),
        "tokens/sampled": float(sum(sampled)),
        "tokens/context_max": float(
            max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns), default=0)
        ),
        "generate/batch_num_seq": float(len(trajectories)),
        "sampling_client/step_min": float(min(versions)),
        "sampling_client/step_mean": float(np.mean(versions)),
        "sampling_client/step_max": float(max(versions)),
    }
    rewards = [trajectory.reward for trajectory in trajectories]
    metrics |= token_metrics([num_response_tokens(trajectory) for trajectory in trajectories], rewards)
    metrics |= _statistics("generate/{}_assistant_tokens", sampled, ("avg", "min", "max", "std"))
    metrics |= _statistics(
        "generate/tokens_per_turn_{}", [len(turn.completion_ids) for turn in turns], ("mean", "std", "max")
    )
    times = [
        trajectory.metrics["duration_s"] for trajectory in trajectories if "duration_s" in trajectory.metrics
    ]
    metrics |= (
        _statistics("generate/trajectory_time_{}", times, ("mean", "std", "min", "max")) if times else {}
    )
    endings = Counter(trajectory.stop_reason for trajectory in trajectories)
    metrics |= {
        f"env/all/stop_reason/{reason}": count / len(trajectories)
        for reason, count in sorted(endings.items())
    }
    return metrics | parse_metrics(trajectories) | judge_metrics(trajectories) | measured(trajectories)


def parse_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of attempted tool calls that could not be read. Where an environment does not count attempts, every turn is one."""
    counted = [trajectory for trajectory in trajectories if "parse_failures" in trajectory.metrics]
    if not counted:
        return {}
    failures = sum(trajectory.metrics["parse_failures"] for trajectory in counted)
    attempts = sum(trajectory.metrics.get("parse_attempts", len(trajectory.turns)) for trajectory in counted)
    recovered = sum(trajectory.metrics.get("parse_recovered", 0.0) for trajectory in counted)
    return {"reward/parse_failure_rate": failures / max(1, attempts), "parse/recovered": float(recovered)}


def judge_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a judge added to the rewards and how often it failed to; all other metrics know the rewards without it."""
    judged = [trajectory for trajectory in trajectories if "judge_bonus" in trajectory.metrics]
    if not judged:
        return {}
    return {
        "reward/avg_shaped_reward": float(
            np.mean([trajectory.reward + trajectory.bonus for trajectory in trajectories])
        ),
        "reward/judge_bonus_mean": float(np.mean([trajectory.bonus for trajectory in judged])),
        **{
            f"judge/{name}": sum(trajectory.metrics[f"judge_{name}"] for trajectory in judged)
            for name in ("calls", "errors", "cost_usd")
        },
    }


def measured(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What environments measured: `environment/<name>` as SkyRL sums it up, `env/all/<name>` the mean per trial that has it."""
    values_of: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values_of[name].append(value)
    found = {f"environment/{name}": aggregate(name, values) for name, values in sorted(values_of.items())}
    return found | {f"env/all/{name}": float(np.mean(values)) for name, values in sorted(values_of.items())}


def aggregate(name: str, values: Sequence[float]) -> float:
    """SkyRL's rule: a name says by its ending how it is summed up.

    >>> [summed_up(name, [1, 3]) for name in ("score_mean", "length_avg", "length_min", "length_max", "tool_calls")]
    [2.0, 2.0, 1.0, 3.0, 4.0]
    """
    if name.endswith(("avg", "mean")):
        return float(np.mean(values))
    if name.endswith("min"):
        return float(min(values))
    return float(max(values) if name.endswith("max") else sum(values))


def token_metrics(num_tokens: Sequence[int], rewards: Sequence[float]) -> dict[str, float]:
    """SkyRL's response lengths: everything after a trajectory's first prompt. `non_zero` is any reward above 0, `zero` exactly 0.

    An empty batch is six zeros and a warning.
    """
    if not num_tokens:
        logger.warning("no trajectory to measure: the generate/ metrics are 0")
    with_reward = [count for count, reward in zip(num_tokens, rewards, strict=True) if reward > 0]
    without = [count for count, reward in zip(num_tokens, rewards, strict=True) if reward == 0]
    return _statistics("generate/{}_num_tokens", num_tokens, ("min", "max", "avg", "std")) | {
        "generate/avg_tokens_non_zero_rewards": float(np.mean(with_reward)) if with_reward else 0.0,
        "generate/avg_tokens_zero_rewards": float(np.mean(without)) if without else 0.0,
    }


def num_response_tokens(trajectory: Trajectory) -> int:
    """Tokens after the first prompt, sampled or observed; a rewritten history begins again behind its own first prompt."""
    runs = merge_turns(trajectory.turns)
    return sum(len(run[-1].prompt_ids) + len(run[-1].completion_ids) - len(run[0].prompt_ids) for run in runs)


def _statistics(pattern: str, values: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    array = np.array(values or [0.0], dtype=float)
    known = {
        "avg": array.mean(),
        "mean": array.mean(),
        "std": array.std(),
        "min": array.min(),
        "max": array.max(),
    }
    return {pattern.format(name): float(known[name]) for name in names}


def batch_metrics(shares: Sequence[Sequence[Example]], dropped: Counter[DropReason]) -> dict[str, float]:
    """What the update is made of."""
    examples = [example for share in shares for example in share]
    advantages = [example.advantage for example in examples]
    sequences = [sequence for example in examples for sequence in example.sequences]
    return {
        **{f"groups/dropped/{reason}": float(dropped[reason]) for reason in DropReason},
        "advantage/mean": float(np.mean(advantages)) if advantages else 0.0,
        "advantage/std": float(np.std(advantages)) if advantages else 0.0,
        "loss/avg_raw_advantages": float(np.mean(advantages)) if advantages else 0.0,
        "loss/avg_raw_advantages_abs": float(np.mean(np.abs(advantages))) if advantages else 0.0,
        "loss/avg_final_rewards": float(np.mean([example.trajectory.reward for example in examples]))
        if examples
        else 0.0,
        "rollouts/truncated_overlong": float(sum(example.num_too_long > 0 for example in examples)),
        "tokens/trained": float(sum(example.num_tokens for example in examples)),
        "tokens/in_batch": float(sum(len(sequence.tokens) for sequence in sequences)),
        "tokens/sequences": float(len(sequences)),
        "tokens/masked_trajectories": float(sum(not example.sequences for example in examples)),
    }


def held_out_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """A held-out set's rewards and failures under `test/`, and a block of its own for each domain, or family where tasks form families."""
    metrics = {f"test/{name}": value for name, value in group_metrics(groups, group_size=group_size).items()}
    for name, own in by_environment(groups).items():
        metrics |= {
            f"test/env/{name}/{key}": value
            for key, value in domain_metrics(own, group_size=group_size).items()
        }
    return metrics


def domain_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """What one domain's held-out trials come to."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    shown = {
        name.removeprefix("env/all/"): value
        for name, value in measured(trajectories).items()
        if name.startswith("env/all/")
    }
    signals = signal_metrics([group.rewards for group in groups], group_size=group_size)
    return (
        shown
        | {f"reward/{name}": value for name, value in signals.items()}
        | success_split(groups)
        | {
            "trials": float(len(rewards)),
            "reward/total": float(np.mean(rewards)),
            "reward/min": float(min(rewards)),
            "reward/max": float(max(rewards)),
            "success": float(np.mean([reward >= SOLVED for reward in rewards])),
            "positive_rate": float(np.mean([reward > 0 for reward in rewards])),
            "turns": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        }
    )


def environment(task: Task) -> str:
    """The key of a task's metrics: its domain, else its family, with no slash in it."""
    return (task.domain or family(task.id)).replace("/", "_") or "unknown"


def family(task_id: str) -> str:
    """A task's id without its number.

    >>> family("quickstart/count-lines-03")
    'count-lines'
    """
    return re.sub(r"[-_]?\d+$", "", task_id.rpartition("/")[2]) or task_id
