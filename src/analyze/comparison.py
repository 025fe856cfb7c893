"""The comparison of several runs: a table of all runs, and a comparison of each further run with the first.

Held-out success is paired by task, and training metrics are paired by step. For example, a run on Tinker can
be compared with a run of the same configuration on another server.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from src.analyze.markdown import MISSING, change, number, percent, table
from src.analyze.report import (
    PASS_K,
    by_task,
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
# Options that name a run, a project or an output directory. Their differences do not affect the training.
NAMING_OPTIONS = {"log_path", "logs_dir", "export_path", "wandb_name", "wandb_project", "trackio_project"}


def overview(runs: Sequence[AnalyzedRun]) -> list[str]:
    """Return a table with one row per run and environment (domain or task type)."""
    rows = []
    for run in runs:
        signals, evaluations = signals_of(run), list(run.evaluations.values())
        names = environments(evaluations[-1]) if evaluations else list(signals)
        for name in names:
            trials_by_step = [of_environment(trials, name) for trials in evaluations]
            final = trials_by_step[-1] if trials_by_step else []
            signal = signals.get(name) or (signals.get(ALL_TASKS) if len(names) == 1 else None)
            rows.append(
                [
                    run.name,
                    name,
                    number(mean([trial.num_turns for trial in final])),
                    number(mean([trial.num_tool_calls for trial in final])),
                    change([percent(pass_rate(trials, PASS_K)) for trials in trials_by_step]) or MISSING,
                    number(signal.mean if signal else None, digits=4),
                    percent(signal.share if signal else None),
                ]
            )
    header = ["run", "environment", "avg turns", "avg tool calls", f"pass@{PASS_K}", "avg variance"]
    return table([*header, "steps with signal"], rows, num_text=2)


def pair(first: AnalyzedRun, second: AnalyzedRun) -> list[str]:
    """Compare the options, the last evaluations and the training metrics of two runs."""
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
    """Return one line with the options whose values differ between the runs, without NAMING_OPTIONS.

    The options of a run are unknown if its directory has only dumps and no config.json."""
    if not (first.options and second.options):
        unknown = " and ".join(run.name for run in (first, second) if not run.options)
        return f"The options of {unknown} are unknown, because there is no config.json."
    names = [name for name in {**first.options, **second.options} if name not in NAMING_OPTIONS]
    differing = [
        f"`{name}={first.options.get(name)}` and `{second.options.get(name)}`"
        for name in names
        if first.options.get(name) != second.options.get(name)
    ]
    return (
        f"Options that differ: {'; '.join(differing)}."
        if differing
        else "The options are equal, except for names and directories."
    )


def held_out_pairs(first: Sequence[DumpedTrial], second: Sequence[DumpedTrial]) -> list[str]:
    """Return a table that compares the success of two evaluations on their common tasks, with one row per
    environment.
    """
    common = by_task(first).keys() & by_task(second).keys()
    rows = []
    for name in environments(second):
        both = [
            [trial for trial in of_environment(trials, name) if trial.task in common]
            for trials in (first, second)
        ]
        comparison = compared(*both)
        if comparison is None:
            rows.append([name, "0", *[MISSING] * 5])
            continue
        rates = [percent(pass_rate(trials, PASS_K)) for trials in both]
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
    """Return a table with a row for each of COMPARED_METRICS that both runs recorded in at least one common
    step. A difference is the value of the second run minus that of the first. The table is empty if there is
    no such metric.
    """
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
            statistics = (*means, fmean(differences), max(map(abs, differences)))
            cells = [f"{value:.4g}" for value in statistics]
            rows.append([f"`{name}`", str(len(steps)), *cells])
    header = ["metric", "steps", first.name, second.name, "mean difference", "largest difference"]
    return table(header, rows) if rows else []
