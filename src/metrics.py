"""Groups, batch and update -> dict[str, float], under the names of tinker-cookbook (progress, env, optim) and SkyRL (reward, generate)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from src.examples import Example
from src.filters import DropReason
from src.trajectory import FailureKind, Trajectory, TrajectoryGroup

SOLVED = 1.0  # the reward from which on a trial counts as a success


def group_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """Rewards, failures and lengths of one batch as it was played, before any filter."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failures = Counter(failure.kind for group in groups for failure in group.failures)
    metrics = {f"trials/failed/{kind}": float(failures[kind]) for kind in FailureKind}
    metrics["trials/ungraded"] = float(failures.total())
    metrics |= {"trials/total": float(len(trajectories) + failures.total()), "trials/graded": float(len(trajectories))}
    if not trajectories:
        return metrics
    return metrics | reward_metrics(groups, group_size=group_size) | by_group(groups) | length_metrics(trajectories)


def reward_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """SkyRL's reward metrics in fleet's definitions: pass is any reward above 0, variances are population variances of groups of 2 or more.

    One success among four gives a variance of 0.1875, two give the largest, 0.25.
    """
    graded = [group.rewards for group in groups if group.trajectories]
    rewards = [reward for group in graded for reward in group]
    positive = [reward for reward in rewards if reward > 0]
    variances = [float(np.var(group)) for group in graded if len(group) > 1]
    return {
        "env/all/reward/total": float(np.mean(rewards)),
        "env/all/success": float(np.mean([reward >= SOLVED for reward in rewards])),
        "reward/avg_raw_reward": float(np.mean(rewards)),
        f"reward/avg_pass_at_{group_size}": float(np.mean([max(group) > 0 for group in graded])),
        "reward/mean_positive_reward": float(np.mean(positive)) if positive else 0.0,
        "reward/variance_per_prompt": float(np.mean(variances)) if variances else 0.0,
        "reward/signal_ratio": float(np.mean([variance > 0 for variance in variances])) if variances else 0.0,
    }


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
    tokens = np.array([sum(len(turn.completion_ids) for turn in trajectory.turns) for trajectory in trajectories], dtype=float)
    versions = [turn.policy_version for turn in turns] or [0]
    metrics = {
        "env/all/turns": len(turns) / len(trajectories),
        "tokens/sampled": float(tokens.sum()),
        "tokens/context_max": float(max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns), default=0)),
        "generate/min_num_tokens": float(tokens.min()),
        "generate/max_num_tokens": float(tokens.max()),
        "generate/avg_num_tokens": float(tokens.mean()),
        "generate/std_num_tokens": float(tokens.std()),
        "sampling_client/step_min": float(min(versions)),
        "sampling_client/step_mean": float(np.mean(versions)),
        "sampling_client/step_max": float(max(versions)),
    }
    endings = Counter(trajectory.stop_reason for trajectory in trajectories)
    metrics |= {f"env/all/stop_reason/{reason}": count / len(trajectories) for reason, count in sorted(endings.items())}
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            measured[name].append(value)
    return metrics | {f"environment/{name}": float(np.mean(values)) for name, values in sorted(measured.items())}


def batch_metrics(shares: Sequence[Sequence[Example]], dropped: Counter[DropReason]) -> dict[str, float]:
    """What the update is made of."""
    examples = [example for share in shares for example in share]
    advantages = [example.advantage for example in examples]
    sequences = [sequence for example in examples for sequence in example.sequences]
    return {
        **{f"groups/dropped/{reason}": float(dropped[reason]) for reason in DropReason},
        "advantage/mean": float(np.mean(advantages)) if advantages else 0.0,
        "advantage/std": float(np.std(advantages)) if advantages else 0.0,
        "tokens/trained": float(sum(example.num_tokens for example in examples)),
        "tokens/in_batch": float(sum(len(sequence.tokens) for sequence in sequences)),
        "tokens/sequences": float(len(sequences)),
        "tokens/masked_trajectories": float(sum(not example.sequences for example in examples)),
    }


def held_out_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """A held-out set's rewards and failures under `test/`, and the reward of each family where tasks form families."""
    metrics = {f"test/{name}": value for name, value in group_metrics(groups, group_size=group_size).items()}
    families: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        families[family(group.task.id)] += group.rewards
    if len(families) < len(groups):
        metrics |= {f"test/env/{name}/reward/total": float(np.mean(rewards)) for name, rewards in sorted(families.items()) if rewards}
    return metrics


def family(task_id: str) -> str:
    """A task's id without its number.

    >>> family("quickstart/count-lines-03")
    'count-lines'
    """
    return re.sub(r"[-_]?\d+$", "", task_id.rpartition("/")[2]) or task_id
