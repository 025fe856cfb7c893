"""The comparison of several runs: a table of all runs, and each run against the first one in pairs.

Held-out success is paired by task, and training metrics are paired by step, so that a run on Tinker can be
compared with a run of the same configuration on another server.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from src.analyze.markdown import MISSING, change, number, percent, table
from src.analyze.report import (
    PASS_K,
    compared,
    difference,
    environments,
    mean,
    of_environment,
    pass_rate,
    signals_of,
)
from src.analyze.run_files import AnalyzedRun, DumpedTrial
from src.records.metrics_table import ALL_TASKS
from src.records.tracking import recorded

COMPARED_METRICS = (
    "env/all/reward/total",
    "env/all/success",
    "reward/variance_per_prompt",
    "reward/signal_ratio",
    "env/all/turns",
    "tokens/sampled",
    "optim/loss",
    "optim/kl_sample_train_v1",
    "optim/kl_sample_train_v2",
    "optim/entropy",
    "optim/grad_norm",
    "policy/rollout_train_logprobs_abs_diff_mean",
    "trials/ungraded",
    "time/rollouts",
    "time/update",
    "time/total",
)
# Options that name a run or a folder. They differ between runs and do not affect the training.
PLACES = {"log_path", "logs_dir", "export_path", "wandb_name", "wandb_project", "trackio_project"}


def overview(runs: Sequence[AnalyzedRun]) -> list[str]:
    """Return one row per run and environment."""
    rows = []
    for run in runs:
        signals, trials = signals_of(run), list(run.evaluations.values())
        names = environments(trials[-1]) if trials else list(signals)
        for name in names:
            members = [of_environment(evaluation, name) for evaluation in trials]
            final = members[-1] if members else []
            signal = signals.get(name) or (signals.get(ALL_TASKS) if len(names) == 1 else None)
            rows.append(
                [
                    run.name,
                    name,
                    number(mean([trial.num_turns for trial in final])),
                    number(mean([trial.num_tool_calls for trial in final])),
                    change([percent(pass_rate(members_of, PASS_K)) for members_of in members]) or MISSING,
                    number(signal.mean if signal else None, digits=4),
                    percent(signal.share if signal else None),
                ]
            )
    header = ["run", "environment", "avg turns", "avg tool calls", f"pass@{PASS_K}", "avg variance", "signal"]
    return table(header, rows, num_text=2)


def pair(first: AnalyzedRun, second: AnalyzedRun) -> list[str]:
    """Compare two runs at the last evaluation of each."""
    lines = [f"### {first.name} and {second.name}", "", differing_options(first, second), ""]
    if first.last_step is not None and second.last_step is not None:
        lines += [
            f"Held-out success at step {first.last_step} and step {second.last_step}, paired by task:",
            "",
            *held_out_pairs(first.evaluations[first.last_step], second.evaluations[second.last_step]),
            "",
        ]
    if steps := metric_pairs(first, second):
        lines += ["Training metrics, paired by step:", "", *steps, ""]
    return lines[:-1]


def differing_options(first: AnalyzedRun, second: AnalyzedRun) -> str:
    """Return one line with the options in which the runs differ."""
    names = [name for name in {**first.options, **second.options} if name not in PLACES]
    differing = [
        f"`{name}={first.options.get(name)}` and `{second.options.get(name)}`"
        for name in names
        if first.options.get(name) != second.options.get(name)
    ]
    return f"Options that differ: {'; '.join(differing)}." if differing else "The options are equal."


def held_out_pairs(first: Sequence[DumpedTrial], second: Sequence[DumpedTrial]) -> list[str]:
    rows = []
    for name in environments(second):
        members = [of_environment(trials, name) for trials in (first, second)]
        comparison = compared(*members)
        if comparison is None:
            rows.append([name, "0", *[MISSING] * 5])
            continue
        rates = [percent(pass_rate(trials, PASS_K)) for trials in members]
        rows.append(
            [
                name,
                str(comparison.difference.num_tasks),
                percent(comparison.first),
                percent(comparison.second),
                difference(comparison),
                f"{comparison.num_better} / {comparison.num_worse}",
                change(rates),
            ]
        )
    header = ["environment", "tasks", "first", "second", "difference", "better / worse", f"pass@{PASS_K}"]
    return table(header, rows)


def metric_pairs(first: AnalyzedRun, second: AnalyzedRun) -> list[str]:
    """Return the means of metrics over the common steps, and the mean and largest difference of a step."""
    if first.metrics_file is None or second.metrics_file is None:
        return []
    rows = []
    for name in COMPARED_METRICS:
        values = [recorded(path, name) for path in (first.metrics_file, second.metrics_file)]
        steps = [step for step in values[0] if step in values[1]]
        if steps:
            pairs = [(values[0][step], values[1][step]) for step in steps]
            differences = [second_value - first_value for first_value, second_value in pairs]
            means = [fmean(column) for column in zip(*pairs, strict=True)]
            shown = (*means, fmean(differences), max(map(abs, differences)))
            cells = [f"{value:.4g}" for value in shown]
            rows.append([f"`{name}`", str(len(steps)), *cells])
    header = ["metric", "steps", first.name, second.name, "mean difference", "largest difference"]
    return table(header, rows) if rows else []
