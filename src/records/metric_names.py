"""The names under which SkyRL, its forks and the seeds know what we measure, so that their dashboards read our runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

ALL_TASKS = "all tasks"  # stands for no domain where lines are shown by domain

DOMAIN = r"(?!all/)([^/]+)"

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
# Names with something of the run's own in them: (ours, theirs). A held-out set called <domain>_val is the seeds' <domain>_val_data.
PATTERNS = [
    (re.compile(ours), theirs)
    for ours, theirs in (
        (r"test/reward/avg_pass_at_(\d+)", r"eval/all/pass_at_\1"),
        (rf"test/env/{DOMAIN}_val/reward/total", r"eval-\1/average_reward"),
        (rf"test/env/{DOMAIN}_val/positive_rate", r"eval-\1/success_rate"),
        (rf"test/env/{DOMAIN}/reward/total", r"test-\1/average_reward"),
        (rf"test/env/{DOMAIN}/reward/(min|max)", r"test-\1/\2_reward"),
        (rf"test/env/{DOMAIN}/positive_rate", r"test-\1/success_rate"),
        (rf"test/env/{DOMAIN}/trials", r"test-\1/num_samples"),
        (rf"test/env/{DOMAIN}/reward/total", r"eval/\1/avg_score"),
        (r"((?:test/)?env/[^/]+)/user_tool_errors", r"\1/customer_tool_errors"),  # its former name
        (rf"test/env/{DOMAIN}/reward/(pass_at_\d+|mean_positive_reward)", r"eval/\1/\2"),
    )
]


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, and what of them others call by another name.

    >>> list(with_aliases({"test/env/retail/positive_rate": 0.5}))
    ['test/env/retail/positive_rate', 'test-retail/success_rate']
    """
    own = {
        name: value for name, value in metrics.items() if not _is_alias(name)
    }  # a line that is amended has its aliases already
    aliases = {theirs: own[ours] for theirs, ours in ALIASES.items() if ours in own}
    for name, value in own.items():
        aliases |= {ours.sub(theirs, name): value for ours, theirs in PATTERNS if ours.fullmatch(name)}
    return own | aliases


def _is_alias(name: str) -> bool:
    return name in ALIASES or name.startswith(("eval/", "eval-", "test-"))
