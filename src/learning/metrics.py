"""Metrics of rolled-out groups and of the training batch. A table entry declares a metric and computes its
value.

To add a metric, add an entry. Names follow tinker-cookbook (`progress`, `env`, `optim`) and SkyRL (`reward`,
`generate`). `src/records/metrics_table.py` joins these tables with the metrics of other modules, and
docs/metrics.md is generated from the result.

This file is long because it contains the tables of all these metrics.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from src.core.metric import Metric, Reduction, Unit, measure
from src.core.trajectory import FailureKind, StopReason, TrajectoryGroup, ZeroReason
from src.learning.datums import TokenSequence
from src.learning.examples import Example, all_sequences
from src.learning.filters import DropReason, is_constant
from src.learning.rollout_groups import (
    RolloutGroups,
    aggregate,
    by_domain_or_task_type,
    num_response_tokens,
    parse_metrics,
    signal_metrics,
    success_rate,
    trajectory_metrics,
)

TIMEOUTS = frozenset({StopReason.TIMEOUT, StopReason.AGENT_TIMEOUT})
COUNT, SHARE, REWARD, TOKENS, VARIES = Unit.COUNT, Unit.SHARE, Unit.REWARD, Unit.TOKENS, Unit.VARIES
MEAN, SUM, MIN, MAX = Reduction.MEAN, Reduction.SUM, Reduction.MIN, Reduction.MAX
STATISTICS = {
    "avg": (MEAN, np.mean),
    "mean": (MEAN, np.mean),
    "std": (Reduction.STD, np.std),
    "min": (MIN, np.min),
    "max": (MAX, np.max),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLengths:
    """The response length of each trajectory in tokens (`num_response_tokens`), and its reward."""

    num_tokens: Sequence[int]
    rewards: Sequence[float]

    @property
    def pairs(self) -> list[tuple[int, float]]:
        return list(zip(self.num_tokens, self.rewards, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """The examples of one update, and the number of groups that a filter removed, by reason."""

    examples: Sequence[Example]
    dropped: Counter[DropReason]

    @property
    def advantages(self) -> list[float]:
        return [example.advantage for example in self.examples] or [0.0]

    @property
    def sequences(self) -> list[TokenSequence]:
        return all_sequences(self.examples)


def group_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """Return counts, rewards and lengths of one batch as it was rolled out.

    Returns only counts if no trial is graded.

    If an environment reports a metric under a name of this module, such as `success`, the metric of this
    module is returned.
    """
    rollouts = RolloutGroups(groups, group_size=group_size)
    counts = measure(TRIAL_METRICS, rollouts)
    if not rollouts.trajectories:
        return counts
    lengths = [num_response_tokens(trajectory) for trajectory in rollouts.trajectories]
    return (
        measure(LENGTH_METRICS, rollouts)
        | counts
        | measure(REWARD_METRICS, rollouts)
        | token_metrics(lengths, rollouts.rewards)
    )


def token_metrics(num_tokens: Sequence[int], rewards: Sequence[float]) -> dict[str, float]:
    """Return the response lengths as SkyRL defines them. An empty batch gives six zeros and a warning."""
    if not num_tokens:
        logger.warning("no trajectory to measure: the generate/ metrics are 0")
    return measure(RESPONSE_METRICS, ResponseLengths(num_tokens=num_tokens, rewards=rewards))


def batch_metrics(
    examples_per_substep: Sequence[Sequence[Example]], dropped: Counter[DropReason]
) -> dict[str, float]:
    examples = [example for substep in examples_per_substep for example in substep]
    return measure(BATCH_METRICS, TrainingBatch(examples=examples, dropped=dropped))


def held_out_metrics(groups: Sequence[TrajectoryGroup], *, group_size: int) -> dict[str, float]:
    """Return an evaluation's metrics: `test/` for all groups, `test/env/<domain>/` by domain or task type."""
    metrics = {f"test/{name}": value for name, value in group_metrics(groups, group_size=group_size).items()}
    for domain, members in by_domain_or_task_type(groups).items():
        values = measure(DOMAIN_METRICS, RolloutGroups(members, group_size=group_size))
        metrics |= {name.replace("<domain>", domain): value for name, value in values.items()}
    return metrics


def _success_where(rollouts: RolloutGroups, writes: bool) -> float | None:
    return success_rate(
        [r for group in rollouts.groups if group.task.has_writes is writes for r in group.rewards]
    )


def _share_of_groups(rollouts: RolloutGroups, condition: Callable[[Sequence[float]], bool]) -> float:
    return float(np.mean([condition(rewards) for rewards in rollouts.rewards_P_G]))


def _signals(rollouts: RolloutGroups) -> dict[str, float]:
    return signal_metrics(rollouts.rewards_P_G, group_size=rollouts.group_size)


def _signals_by_domain_or_task_type(rollouts: RolloutGroups) -> dict[str, float]:
    return {
        f"reward/{name}/{signal}": value
        for name, groups in by_domain_or_task_type(rollouts.groups).items()
        for signal, value in _signals(RolloutGroups(groups, group_size=rollouts.group_size)).items()
    }


def _stop_reasons(rollouts: RolloutGroups) -> dict[str, float]:
    total = len(rollouts.trajectories)
    return {
        f"env/all/stop_reason/{name}": count / total for name, count in sorted(rollouts.stop_reasons.items())
    }


def _sampled_tokens(rollouts: RolloutGroups) -> list[int]:
    return [
        sum(len(turn.completion_ids) for turn in trajectory.turns) for trajectory in rollouts.trajectories
    ]


def _durations(rollouts: RolloutGroups) -> list[float] | None:
    durations = (trajectory.metrics.get("duration_s") for trajectory in rollouts.trajectories)
    return [seconds for seconds in durations if seconds is not None] or None


def _judge_sum(rollouts: RolloutGroups, name: str) -> float | None:
    return sum(trajectory.metrics[name] for trajectory in rollouts.judged) if rollouts.judged else None


def _statistics[Source](
    pattern: str,
    statistics: Sequence[str],
    unit: Unit,
    meaning: str,
    values: Callable[[Source], Sequence[float] | None],
) -> tuple[Metric[Source], ...]:
    """Declare one metric per statistic of the same values. A metric is absent if `values` returns None, and 0
    if it returns an empty sequence."""

    def statistic(name: str) -> Metric[Source]:
        reduction, function = STATISTICS[name]

        def compute(source: Source) -> float | None:
            numbers = values(source)
            return None if numbers is None else float(function(np.array(numbers or [0.0], dtype=float)))

        return Metric(pattern.format(name), unit, reduction, meaning, compute)

    return tuple(statistic(name) for name in statistics)


def _of_domain(*names: str) -> tuple[Metric[RolloutGroups], ...]:
    """Return copies of metrics for one domain: `env/all/success` becomes `test/env/<domain>/success`."""
    metrics = {metric.name: metric for metric in (*REWARD_METRICS, *LENGTH_METRICS)}
    return tuple(
        replace(metrics[name], name=re.sub("^(env/all|reward)/", "test/env/<domain>/", name))
        for name in names
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


# One entry takes two or three lines; the formatter would take seven.
# fmt: off
TRIAL_METRICS: tuple[Metric[RolloutGroups], ...] = (
    Metric("trials/total", COUNT, SUM, "Trials that were run, graded or not.",
        lambda rollouts: len(rollouts.trajectories) + rollouts.failures.total()),
    Metric("trials/graded", COUNT, SUM, "Trials with a reward.", lambda rollouts: len(rollouts.trajectories)),
    Metric("trials/ungraded", COUNT, SUM, "Trials without a reward.",
        lambda rollouts: rollouts.failures.total()),
    Metric("trials/failed/<kind>", COUNT, SUM,
        "Trials without a reward, by the kind of the infrastructure failure.",
        lambda rollouts: {f"trials/failed/{kind}": rollouts.failures[kind] for kind in FailureKind}),
    Metric("trials/graded_zero/<reason>", COUNT, SUM,
        "Trials with reward 0 whose agent prevented its own grading.",
        lambda rollouts: {f"trials/graded_zero/{name}": rollouts.zero_reasons[name] for name in ZeroReason}),
    Metric("generate/trajectory_timeouts", COUNT, SUM, "Trials that reached a deadline, graded or not.",
        lambda rollouts: rollouts.failures[FailureKind.TIMEOUT]
            + sum(rollouts.stop_reasons[r] for r in TIMEOUTS)),
)

REWARD_METRICS: tuple[Metric[RolloutGroups], ...] = (
    Metric("env/all/reward/total", REWARD, MEAN, "Reward per graded trial.",
        lambda rollouts: _mean(rollouts.rewards)),
    Metric("env/all/reward/min", REWARD, MIN, "Smallest reward of a trial.",
        lambda rollouts: min(rollouts.rewards)),
    Metric("env/all/reward/max", REWARD, MAX, "Largest reward of a trial.",
        lambda rollouts: max(rollouts.rewards)),
    Metric("env/all/success", SHARE, MEAN, "Graded trials with a reward of at least 1.",
        lambda rollouts: success_rate(rollouts.rewards)),
    Metric("env/all/success_write", SHARE, MEAN,
        "Success at tasks whose solution changes the database of the domain.",
        lambda rollouts: _success_where(rollouts, writes=True)),
    Metric("env/all/success_nowrite", SHARE, MEAN,
        "Success at tasks whose solution does not change the database of the domain.",
        lambda rollouts: _success_where(rollouts, writes=False)),
    Metric("reward/positive_rate", SHARE, MEAN, "Graded trials with a reward above 0.",
        lambda rollouts: _mean([reward > 0 for reward in rollouts.rewards])),
    Metric("reward/zero_reward_rate", SHARE, MEAN, "Graded trials with the reward 0.",
        lambda rollouts: _mean([reward == 0 for reward in rollouts.rewards])),
    Metric("reward/mean_clipped_at_zero", REWARD, MEAN,
        "`max(reward, 0)` per trial. SkyRL's main branch has this value as `mean_positive_reward`.",
        lambda rollouts: _mean([max(reward, 0.0) for reward in rollouts.rewards])),
    Metric("reward/avg_pass_at_<k>", SHARE, MEAN, "Groups with any reward above 0. k is the group size.",
        lambda rollouts: {f"reward/avg_{n}": v for n, v in _signals(rollouts).items() if "pass_at" in n}),
    Metric("reward/variance_per_prompt", REWARD, MEAN,
        "Population variance of the rewards of a group of two or more trials.",
        lambda rollouts: _signals(rollouts)["variance_per_prompt"]),
    Metric("reward/signal_ratio", SHARE, MEAN,
        "Groups whose rewards differ, among those with two or more trials.",
        lambda rollouts: _signals(rollouts)["signal_ratio"]),
    Metric("reward/mean_positive_reward", REWARD, MEAN, "Mean of the rewards above 0; 0 if there are none.",
        lambda rollouts: _signals(rollouts)["mean_positive_reward"]),
    Metric("reward/<domain>/<signal>", VARIES, MEAN,
        "`pass_at_<k>`, `variance_per_prompt`, `signal_ratio`, `mean_positive_reward` of a domain or "
        "task type.",
        _signals_by_domain_or_task_type),
    Metric("env/all/by_group/frac_mixed", SHARE, MEAN, "Groups whose rewards differ, among all groups.",
        lambda rollouts: _share_of_groups(rollouts, lambda rewards: not is_constant(rewards))),
    Metric("env/all/by_group/frac_all_good", SHARE, MEAN, "Groups whose rewards are equal and at least 0.5.",
        lambda rollouts: _share_of_groups(
            rollouts, lambda rewards: is_constant(rewards) and rewards[0] >= 0.5)),
    Metric("env/all/by_group/frac_all_bad", SHARE, MEAN, "Groups whose rewards are equal and below 0.5.",
        lambda rollouts: _share_of_groups(
            rollouts, lambda rewards: is_constant(rewards) and rewards[0] < 0.5)),
    Metric("reward/avg_shaped_reward", REWARD, MEAN, "Reward plus the judge's bonus, if there is a judge.",
        lambda rollouts: _mean([t.reward + t.bonus for t in rollouts.trajectories])
            if rollouts.judged else None),
    Metric("reward/judge_bonus_mean", REWARD, MEAN, "Bonus of a judged trial.",
        lambda rollouts: _mean([t.bonus for t in rollouts.judged]) if rollouts.judged else None),
    Metric("judge/calls", COUNT, SUM, "Calls of the judge.",
        lambda rollouts: _judge_sum(rollouts, "judge_calls")),
    Metric("judge/errors", COUNT, SUM, "Judged trials without a usable verdict, which earn no bonus.",
        lambda rollouts: _judge_sum(rollouts, "judge_errors")),
    Metric("judge/cost_usd", Unit.USD, SUM, "Price of the judge's tokens.",
        lambda rollouts: _judge_sum(rollouts, "judge_cost_usd")),
    Metric("reward/parse_failure_rate", SHARE, MEAN,
        "Answers that could not be parsed, as a share of the answers with a tool call (Terminus-2: of all "
        "answers).",
        lambda rollouts: parse_metrics(rollouts.trajectories).get("reward/parse_failure_rate")),
    Metric("parse/recovered", COUNT, SUM, "Tool calls whose missing closing brackets were added.",
        lambda rollouts: parse_metrics(rollouts.trajectories).get("parse/recovered")),
)

RESPONSE_METRICS: tuple[Metric[ResponseLengths], ...] = (
    *_statistics("generate/{}_num_tokens", ("min", "max", "avg", "std"), TOKENS,
        "Sampled and observed tokens of a trajectory, without the first prompt of each chain.",
        lambda lengths: lengths.num_tokens),
    Metric("generate/avg_tokens_non_zero_rewards", TOKENS, MEAN,
        "`generate/avg_num_tokens`, over trajectories with a reward above 0.",
        lambda lengths: _mean([n for n, reward in lengths.pairs if reward > 0])),
    Metric("generate/avg_tokens_zero_rewards", TOKENS, MEAN,
        "`generate/avg_num_tokens`, over trajectories with the reward 0.",
        lambda lengths: _mean([n for n, reward in lengths.pairs if reward == 0])),
)

LENGTH_METRICS: tuple[Metric[RolloutGroups], ...] = (
    Metric("environment/<name>", VARIES, SUM,
        "A metric of the trial (`Trajectory.metrics`). If its name ends in avg, mean, min or max, that "
        "reduction replaces the sum.",
        lambda rollouts: {
            f"environment/{n}": aggregate(n, v) for n, v in trajectory_metrics(rollouts).items()}),
    Metric("env/all/<name>", VARIES, MEAN,
        "A metric of the trial (`Trajectory.metrics`), over the trials that have it.",
        lambda rollouts: {f"env/all/{n}": _mean(v) for n, v in trajectory_metrics(rollouts).items()}),
    Metric("env/all/turns", COUNT, MEAN, "Turns per trial.",
        lambda rollouts: len(rollouts.turns) / len(rollouts.trajectories)),
    Metric("tokens/sampled", TOKENS, SUM, "Sampled tokens of the graded trials.",
        lambda rollouts: sum(_sampled_tokens(rollouts))),
    Metric("tokens/context_max", TOKENS, MAX, "Longest prompt plus completion of a turn.",
        lambda rollouts: max((len(t.prompt_ids) + len(t.completion_ids) for t in rollouts.turns), default=0)),
    Metric("generate/batch_num_seq", COUNT, SUM, "Graded trials, under SkyRL's name.",
        lambda rollouts: len(rollouts.trajectories)),
    *_statistics("sampling_client/step_{}", ("min", "mean", "max"), Unit.UPDATES,
        "Policy version that sampled a turn.", lambda rollouts: rollouts.versions),
    *_statistics("generate/{}_assistant_tokens", ("avg", "min", "max", "std"), TOKENS,
        "Sampled tokens of a trajectory.", _sampled_tokens),
    *_statistics("generate/tokens_per_turn_{}", ("mean", "std", "max"), TOKENS, "Sampled tokens of a turn.",
        lambda rollouts: [len(turn.completion_ids) for turn in rollouts.turns]),
    *_statistics("generate/trajectory_time_{}", ("mean", "std", "min", "max"), Unit.SECONDS,
        "Duration of a trial.", _durations),
    Metric("env/all/stop_reason/<reason>", SHARE, MEAN, "Trials that ended for this reason (`StopReason`).",
        _stop_reasons),
)

BATCH_METRICS: tuple[Metric[TrainingBatch], ...] = (
    Metric("groups/dropped/<reason>", COUNT, SUM, "Groups that a filter removed from the batch.",
        lambda batch: {f"groups/dropped/{reason}": batch.dropped[reason] for reason in DropReason}),
    Metric("advantage/mean", Unit.ADVANTAGE, MEAN, "Advantage of an example.",
        lambda batch: _mean(batch.advantages)),
    Metric("advantage/std", Unit.ADVANTAGE, Reduction.STD, "Advantage of an example.",
        lambda batch: float(np.std(batch.advantages))),
    Metric("advantage/abs_mean", Unit.ADVANTAGE, MEAN, "Absolute advantage of an example.",
        lambda batch: _mean([abs(value) for value in batch.advantages])),
    Metric("loss/avg_final_rewards", REWARD, MEAN,
        "Reward of an example after the judge's bonus and the rules `failed_trial_reward`, "
        "`zero_reward_on_non_stop` and `zero_reward_on_length_threshold`.",
        lambda batch: _mean([example.trajectory.reward for example in batch.examples])),
    Metric("batch/truncated_overlong", COUNT, SUM,
        "Examples with a sequence longer than `max_sequence_length`.",
        lambda batch: sum(example.num_too_long > 0 for example in batch.examples)),
    Metric("batch/masked_trajectories", COUNT, SUM,
        "Examples without training sequences: masked, too long or without sampled tokens.",
        lambda batch: sum(not example.sequences for example in batch.examples)),
    Metric("batch/sequences", COUNT, SUM, "Training sequences.", lambda batch: len(batch.sequences)),
    Metric("tokens/trained", TOKENS, SUM, "Sampled tokens in the training sequences.",
        lambda batch: sum(example.num_tokens for example in batch.examples)),
    Metric("tokens/in_batch", TOKENS, SUM, "Tokens of the training sequences, observed ones included.",
        lambda batch: sum(len(sequence.tokens) for sequence in batch.sequences)),
)

DOMAIN_METRICS: tuple[Metric[RolloutGroups], ...] = (
    Metric("test/env/<domain>/<name>", VARIES, MEAN,
        "A metric of the trial (`Trajectory.metrics`), over the trials that have it.",
        lambda rollouts: {
            f"test/env/<domain>/{n}": _mean(v) for n, v in trajectory_metrics(rollouts).items()}),
    Metric("test/env/<domain>/reward/<signal>", VARIES, MEAN,
        "As `reward/<domain>/<signal>`, for the held-out tasks of the domain.",
        lambda rollouts: {f"test/env/<domain>/reward/{n}": v for n, v in _signals(rollouts).items()}),
    *_of_domain("env/all/success_write", "env/all/success_nowrite"),
    Metric("test/env/<domain>/trials", COUNT, SUM, "Graded trials.", lambda rollouts: len(rollouts.rewards)),
    *_of_domain("env/all/reward/total", "env/all/reward/min", "env/all/reward/max", "env/all/success",
        "reward/positive_rate", "env/all/turns"),
)
# fmt: on
