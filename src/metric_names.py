"""The names under which SkyRL, its forks and the seeds know what we measure, so that their dashboards read our runs."""

from __future__ import annotations

from collections.abc import Mapping

# their name -> ours
ALIASES = {
    "generation/avg_reward": "env/all/reward/total",
    "generation/success_rate": "reward/positive_rate",
    "train/avg_reward": "env/all/reward/total",
    "loss/avg_raw_rewards": "env/all/reward/total",
    "trainer/epoch": "progress/epoch",
    "trainer/global_step": "progress/batch",
    "timing/step": "time/total",
    "timing/generate": "time/rollouts",
    "timing/policy_train": "time/update",
    "timing/eval": "time/evaluation",
    "rollout/avg_duration": "generate/trajectory_time_mean",
    "rollout/min_duration": "generate/trajectory_time_min",
    "rollout/max_duration": "generate/trajectory_time_max",
    "policy/policy_lr": "optim/lr",
    "policy/grad_norm": "optim/grad_norm",
    "policy/policy_kl": "optim/kl_policy_base",
    "eval/all/avg_score": "test/env/all/reward/total",
    "eval/all/mean_positive_reward": "test/reward/mean_positive_reward",
}
RENAMED = (("test/reward/avg_pass_at_", "eval/all/pass_at_"),)  # beginnings; what follows stays


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and what of them others call by another name.

    >>> with_aliases({"test/reward/avg_pass_at_4": 0.5})
    {'test/reward/avg_pass_at_4': 0.5, 'eval/all/pass_at_4': 0.5}
    """
    own = {name: value for name, value in metrics.items() if not _is_alias(name)}  # a line that is amended has its aliases already
    aliases = {theirs: own[ours] for theirs, ours in ALIASES.items() if ours in own}
    for ours, theirs in RENAMED:
        aliases |= {theirs + name.removeprefix(ours): value for name, value in own.items() if name.startswith(ours)}
    return own | aliases


def _is_alias(name: str) -> bool:
    return name in ALIASES or name.startswith(tuple(theirs for _, theirs in RENAMED))
