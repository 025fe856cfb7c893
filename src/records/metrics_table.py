"""All metrics of a run, and their aliases. docs/metrics.md is generated from this module.

`SECTIONS` joins the tables of `src/learning/metrics.py`, whose entries compute their values, with the metrics
that other modules compute. `ALIASES` has the names of the same metrics in SkyRL, in the seed documents (the
documents that define this project) and in earlier releases, so that dashboards with these names work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from src.core.metric import Metric, Reduction, Unit
from src.learning.metrics import (
    BATCH_METRICS,
    DOMAIN_METRICS,
    LENGTH_METRICS,
    RESPONSE_METRICS,
    REWARD_METRICS,
    TRIAL_METRICS,
)

ALL_TASKS = "all tasks"  # the key of all tasks together, in results by domain or task type
COUNT, SHARE, SECONDS, NATS = Unit.COUNT, Unit.SHARE, Unit.SECONDS, Unit.NATS
MEAN, SUM, MAX, LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.LAST

# One entry takes one or two lines; the formatter would take seven.
# fmt: off
PROGRESS_METRICS: tuple[Metric[Any], ...] = (
    Metric("progress/batch", COUNT, LAST, "Training step."),
    Metric("progress/epoch", COUNT, LAST, "Epoch of the training tasks."),
    Metric("progress/done_frac", SHARE, LAST, "Share of the run's steps that are done."),
    Metric("time/total", SECONDS, SUM,
        "Duration of the step, without its checkpoint. The next four metrics are its main parts."),
    Metric("time/rollouts", SECONDS, SUM, "Time to collect the groups of the step."),
    Metric("time/update", SECONDS, SUM, "Time to prepare and train the batch."),
    Metric("time/sync_weights", SECONDS, SUM,
        "Time to prepare the updated weights for sampling."),
    Metric("time/evaluation", SECONDS, SUM, "Duration of the evaluation, on steps that have one."),
    Metric("time/max_event_loop_gap_s", SECONDS, MAX,
        "Longest delay of a timer by code that blocked the event loop."),
    Metric("throughput/sampled_tokens_per_s", Unit.TOKENS_PER_SECOND, MEAN,
        "`tokens/sampled` divided by `time/rollouts`."),
)

SAMPLING_METRICS: tuple[Metric[Any], ...] = (
    Metric("trials/retries", COUNT, SUM, "Attempts that repeat an attempt with an infrastructure failure."),
    Metric("groups/quarantined", COUNT, SUM,
        "Groups of the step that were skipped because their task is quarantined."),
    Metric("tasks/quarantined", COUNT, LAST, "Tasks in quarantine."),
    Metric("async/groups_in_flight", COUNT, LAST,
        "Groups that the pipeline is rolling out when the step begins (`max_staleness` or `stream_groups`)."),
    Metric("async/groups_waiting", COUNT, LAST,
        "Finished groups that no step has taken when the step begins."),
    Metric("curriculum/tasks_unplayed", COUNT, LAST,
        "Training tasks without a trial (`task_sampling=thompson`)."),
    Metric("curriculum/tasks_hard", COUNT, LAST, "Tasks with an estimated success rate below 0.1."),
    Metric("curriculum/tasks_mid", COUNT, LAST, "Tasks with an estimated success rate from 0.1 to 0.9."),
    Metric("curriculum/tasks_easy", COUNT, LAST, "Tasks with an estimated success rate above 0.9."),
    Metric("dynamic_sampling/batches", COUNT, SUM, "Batches sampled for the step (`dynamic_sampling`)."),
    Metric("dynamic_sampling/bad_groups", COUNT, SUM,
        "Groups without differing rewards or below `min_group_size`, over all batches of the step."),
    Metric("dynamic_sampling/replaced_groups", COUNT, SUM, "Bad groups replaced by copies of good groups."),
    Metric("dynamic_sampling/surplus_groups", COUNT, SUM,
        "Good groups beyond the batch size, which are not trained."),
    Metric("reward/zeroed_by_non_stop", COUNT, SUM,
        "Rewards above 0 that `zero_reward_on_non_stop` set to 0."),
    Metric("reward/zeroed_by_length", COUNT, SUM,
        "Rewards above 0 that `zero_reward_on_length_threshold` set to 0."),
)

UPDATE_METRICS: tuple[Metric[Any], ...] = (
    Metric("optim/lr", Unit.VARIES, LAST, "Learning rate."),
    Metric("optim/num_substeps", COUNT, SUM, "Optimizer steps of the update."),
    Metric("optim/loss", Unit.VARIES, SUM, "Loss as the server reports it."),
    Metric("optim/kl_sample_train_v1", NATS, MEAN,
        "Sampler minus trainer logprob per trained token (Schulman's k1). With `tis` or a TIS mask, the "
        "trainer logprobs are computed before the first optimizer step."),
    Metric("optim/kl_sample_train_v2", NATS, MEAN,
        "Half the squared difference of sampler and trainer logprob per trained token (k2)."),
    Metric("optim/entropy", NATS, MEAN, "Negative sampler logprob per trained token."),
    Metric("optim/clip_frac", SHARE, MEAN,
        "Trained tokens with a ratio outside the clip bounds (ppo, cispo)."),
    Metric("optim/kl_policy_base", NATS, MEAN,
        "KL divergence to the base model per token (`kl_penalty_coef`)."),
    Metric("optim/kl_policy_teacher", NATS, MEAN, "KL divergence to the teacher per token (`teacher`)."),
    Metric("optim/<name>", Unit.VARIES, MEAN,
        "Metrics that the server returns for an optimizer step, such as `optim/grad_norm`."),
    Metric("policy/rollout_train_logprobs_abs_diff_mean", NATS, MEAN,
        "Absolute difference of sampler and trainer logprobs before the first optimizer step."),
    Metric("policy/rollout_train_logprobs_abs_diff_max", NATS, MAX,
        "Largest absolute difference of sampler and trainer logprobs before the first optimizer step."),
    Metric("tis/mean_factor", Unit.RATIO, MEAN, "Factor of a token's advantage (`tis` or a TIS mask)."),
    Metric("tis/capped_fraction", SHARE, MEAN,
        "Tokens, or examples for `tis=sequence`, with a capped ratio."),
    Metric("tis/masked_sequences", COUNT, SUM, "Examples masked as a whole by their ratios."),
    Metric("tis/masked_tokens", COUNT, SUM, "Tokens masked by their own ratio."),
    Metric("staleness/mean", Unit.UPDATES, MEAN,
        "Staleness of a sampled token when it is trained (`max_staleness` or `stream_groups`)."),
    Metric("staleness/max", Unit.UPDATES, MAX, "Largest staleness of a sampled token."),
    Metric("staleness/masked_tokens", COUNT, SUM,
        "Tokens older than `max_staleness`, which are not trained."),
    Metric("staleness/masked_trajectories", COUNT, SUM,
        "Trajectories whose sampled tokens are all older than `max_staleness`."),
)

SUPERVISED_METRICS: tuple[Metric[Any], ...] = (
    Metric("sft/nll", NATS, MEAN, "Negative logprob per trained token of the batch, before the update."),
    Metric("sft/chats", COUNT, SUM, "Chats of the batch."),
    Metric("sft/tokens", Unit.TOKENS, SUM, "Tokens of the batch."),
    Metric("sft/trained_tokens", Unit.TOKENS, SUM, "Tokens that `train_on` selects."),
    Metric("test/nll", NATS, MEAN, "Negative logprob per trained token of the held-out chats."),
)

EVALUATION_METRICS: tuple[Metric[Any], ...] = (
    *(metric for prefix, scope in (("test", ""), ("test/env/<domain>", ", of one domain")) for metric in (
        Metric(f"{prefix}/<rate>_at_<k>", SHARE, MEAN,
            f"pass@k: probability that one or more of k trials solve the task, mean over tasks{scope}."),
        Metric(f"{prefix}/<rate>_hat_<k>", SHARE, MEAN,
            f"pass^k: probability that all k trials solve the task, mean over tasks{scope}."),
        Metric(f"{prefix}/<rate>_low", SHARE, MEAN,
            f"Lower end of the 95 % interval of a rate{scope}."),
        Metric(f"{prefix}/<rate>_high", SHARE, MEAN,
            f"Upper end of the 95 % interval of a rate{scope}."),
        Metric(f"{prefix}/noop_success", SHARE, MEAN,
            f"Tasks that are solved by doing nothing{scope}."),
        Metric(f"{prefix}/failures/<pattern>", SHARE, MEAN,
            f"Failed trials that show a failure pattern{scope}."),
    )),
    Metric("test/reward/avg_pass_at_<k>", SHARE, MEAN,
        "SkyRL's pass@k, for every k up to the group size: one of k trials has a reward above 0."),
    Metric("test/env/<domain>/reward/pass_at_<k>", SHARE, MEAN,
        "`test/reward/avg_pass_at_<k>`, for one domain."),
    *DOMAIN_METRICS,
)
# fmt: on

ROLLOUT_METRICS: tuple[Metric[Any], ...] = (
    *TRIAL_METRICS,
    *REWARD_METRICS,
    *RESPONSE_METRICS,
    *LENGTH_METRICS,
)
SECTIONS: dict[str, tuple[Metric[Any], ...]] = {
    "Progress and time": PROGRESS_METRICS,
    "Trials": TRIAL_METRICS,
    "Rewards": REWARD_METRICS,
    "Turns, tokens and stop reasons": (*RESPONSE_METRICS, *LENGTH_METRICS),
    "Task selection and sampling": SAMPLING_METRICS,
    "Training batch": BATCH_METRICS,
    "Update": UPDATE_METRICS,
    "Evaluation": EVALUATION_METRICS,
    "Supervised fine-tuning": SUPERVISED_METRICS,
}


class Source(StrEnum):
    """Which program or document uses an alias."""

    SKYRL = "SkyRL"
    SEED = "seed documents"  # the documents that docs/seed-behaviours.md compares with this repository
    RENAMED = "earlier release"


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a metric. Parts in angle brackets are copied from the metric's name."""

    name: str
    metric: str
    source: Source


ALIASES = (
    Alias("reward/avg_raw_reward", "env/all/reward/total", Source.SKYRL),
    Alias("generation/avg_reward", "env/all/reward/total", Source.SEED),
    Alias("train/avg_reward", "env/all/reward/total", Source.SEED),
    Alias("loss/avg_raw_rewards", "env/all/reward/total", Source.SKYRL),
    Alias("train/min_reward", "env/all/reward/min", Source.SEED),
    Alias("train/max_reward", "env/all/reward/max", Source.SEED),
    Alias("generation/success_rate", "reward/positive_rate", Source.SEED),
    Alias("loss/avg_raw_advantages", "advantage/mean", Source.SKYRL),
    Alias("loss/avg_raw_advantages_abs", "advantage/abs_mean", Source.SKYRL),
    Alias("rollouts/total", "trials/total", Source.SKYRL),
    Alias("rollouts/valid", "trials/graded", Source.SKYRL),
    Alias("rollouts/invalid", "trials/ungraded", Source.SKYRL),
    Alias("rollouts/truncated_overlong", "batch/truncated_overlong", Source.SKYRL),
    Alias("generate/env_init_failures", "trials/failed/env_init_failed", Source.SKYRL),
    Alias("trainer/epoch", "progress/epoch", Source.SKYRL),
    Alias("trainer/global_step", "progress/batch", Source.SKYRL),
    Alias("timing/step", "time/total", Source.SKYRL),
    Alias("timing/generate", "time/rollouts", Source.SKYRL),
    Alias("timing/policy_train", "time/update", Source.SKYRL),
    Alias("timing/sync_weights", "time/sync_weights", Source.SKYRL),
    Alias("timing/eval", "time/evaluation", Source.SKYRL),
    Alias("rollout/avg_duration", "generate/trajectory_time_mean", Source.SEED),
    Alias("rollout/min_duration", "generate/trajectory_time_min", Source.SEED),
    Alias("rollout/max_duration", "generate/trajectory_time_max", Source.SEED),
    Alias("policy/policy_lr", "optim/lr", Source.SKYRL),
    Alias("policy/grad_norm", "optim/grad_norm", Source.SKYRL),
    Alias("policy/policy_kl", "optim/kl_policy_base", Source.SKYRL),
    Alias("policy/policy_entropy", "optim/entropy", Source.SKYRL),
    Alias("policy/ppo_clip_ratio", "optim/clip_frac", Source.SKYRL),
    Alias("eval/all/avg_score", "test/env/all/reward/total", Source.SKYRL),
    Alias("eval/all/mean_positive_reward", "test/reward/mean_positive_reward", Source.SKYRL),
    Alias("eval/all/pass_at_<k>", "test/reward/avg_pass_at_<k>", Source.SKYRL),
    # eval-<domain> contains the metrics of the held-out set <domain>_val.
    Alias("eval-<domain>/average_reward", "test/env/<domain>_val/reward/total", Source.SEED),
    Alias("eval-<domain>/success_rate", "test/env/<domain>_val/positive_rate", Source.SEED),
    Alias("test-<domain>/average_reward", "test/env/<domain>/reward/total", Source.SEED),
    Alias("test-<domain>/min_reward", "test/env/<domain>/reward/min", Source.SEED),
    Alias("test-<domain>/max_reward", "test/env/<domain>/reward/max", Source.SEED),
    Alias("test-<domain>/success_rate", "test/env/<domain>/positive_rate", Source.SEED),
    Alias("test-<domain>/num_samples", "test/env/<domain>/trials", Source.SEED),
    Alias("env/all/customer_tool_errors", "env/all/user_tool_errors", Source.RENAMED),
    Alias("environment/customer_tool_errors", "environment/user_tool_errors", Source.RENAMED),
    Alias("eval/<domain>/avg_score", "test/env/<domain>/reward/total", Source.SKYRL),
    Alias("eval/<domain>/pass_at_<k>", "test/env/<domain>/reward/pass_at_<k>", Source.SKYRL),
    Alias(
        "eval/<domain>/mean_positive_reward", "test/env/<domain>/reward/mean_positive_reward", Source.SKYRL
    ),
    Alias("test/failures/customer_fault", "test/failures/user_simulator_fault", Source.RENAMED),
    Alias(
        "test/env/<domain>/failures/customer_fault",
        "test/env/<domain>/failures/user_simulator_fault",
        Source.RENAMED,
    ),
    Alias("test/floor", "test/noop_success", Source.RENAMED),
    Alias("test/env/<domain>/floor", "test/env/<domain>/noop_success", Source.RENAMED),
    Alias("tokens/masked_trajectories", "batch/masked_trajectories", Source.RENAMED),
    Alias("tokens/sequences", "batch/sequences", Source.RENAMED),
    Alias("test/reward/avg_raw_reward", "test/env/all/reward/total", Source.RENAMED),
    Alias("test/train/min_reward", "test/env/all/reward/min", Source.RENAMED),
    Alias("test/train/max_reward", "test/env/all/reward/max", Source.RENAMED),
    Alias("test/rollouts/total", "test/trials/total", Source.RENAMED),
    Alias("test/rollouts/valid", "test/trials/graded", Source.RENAMED),
    Alias("test/rollouts/invalid", "test/trials/ungraded", Source.RENAMED),
    Alias("test/generate/env_init_failures", "test/trials/failed/env_init_failed", Source.RENAMED),
    Alias("rewards/zeroed_by_non_stop", "reward/zeroed_by_non_stop", Source.RENAMED),
    Alias("rewards/zeroed_by_length", "reward/zeroed_by_length", Source.RENAMED),
)
RENAMED = tuple(alias for alias in ALIASES if alias.source is Source.RENAMED)
RENAMED_NOTICE = "some metrics were renamed; this release also logs their old names, see docs/metrics.md"


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics and their aliases. Aliases in the input are computed again.

    >>> list(with_aliases({"test/env/retail/positive_rate": 0.5}))
    ['test/env/retail/positive_rate', 'test-retail/success_rate']
    """
    values = {name: value for name, value in metrics.items() if not is_alias(name)}
    aliases = {alias: value for name, value in values.items() for alias in aliases_of(name)}
    return values | aliases


@cache
def aliases_of(name: str) -> tuple[str, ...]:
    """Return the other names of a metric, in the order of the table.

    >>> aliases_of("test/env/retail_val/reward/total")[0]
    'eval-retail/average_reward'
    """
    matches = ((alias, _pattern(alias.metric).fullmatch(name)) for alias in ALIASES)
    return tuple(_filled(alias.name, match.groupdict()) for alias, match in matches if match)


@cache
def is_alias(name: str) -> bool:
    return any(_pattern(alias.name).fullmatch(name) for alias in ALIASES)


@cache
def metric_of(name: str) -> Metric[Any] | None:
    """Return the entry that describes a logged name; None if no entry does.

    An evaluation logs the metrics of its trials under `test/`, and an alias has the entry of its metric.

    >>> metric_of("test/trials/failed/sandbox").name
    'trials/failed/<kind>'
    """
    entries = [(metric.name, metric) for section in SECTIONS.values() for metric in section]
    entries += [(f"test/{metric.name}", metric) for metric in ROLLOUT_METRICS]
    matches = [(pattern, metric) for pattern, metric in entries if _pattern(pattern).fullmatch(name)]
    if matches:  # prefer patterns without `<name>`, then the pattern with the fewest placeholders
        return min(matches, key=lambda match: ("<name>" in match[0], match[0].count("<")))[1]
    for alias in ALIASES:
        if match := _pattern(alias.name).fullmatch(name):
            return metric_of(_filled(alias.metric, match.groupdict()))
    return None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Compile a name. <domain> is never `all`, <k> is a number, and <name> may contain slashes."""
    parts = {"<domain>": r"(?P<domain>(?!all/)[^/]+)", "<k>": r"(?P<k>\d+)", "<name>": r"(?P<name>.+)"}
    pieces = (
        parts.get(piece, rf"(?P{piece}[^/]+)") if piece.startswith("<") else re.escape(piece)
        for piece in re.split(r"(<\w+>)", name)
    )
    return re.compile("".join(pieces))


def _filled(name: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"<(\w+)>", lambda part: parts[part[1]], name)
