"""The analysis of one run: held-out results, training signal, failure patterns and the tasks that fail.

In the tables of the analysis, an environment is a domain of tasks, such as retail, or a task type.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from src.analyze.markdown import MISSING, change, number, percent, table
from src.analyze.run_files import AnalyzedRun, DumpedTrial
from src.evaluate.eval_stats import Comparison, Tally, compare_paired, pass_at_k
from src.evaluate.failure_patterns import Pattern, pattern_counts, patterns, result_patterns, tool_results
from src.learning.rollout_groups import SOLVED
from src.loop.outcome import MIN_SIGNAL
from src.records.metrics_table import ALL_TASKS
from src.records.tracking import recorded_variances

PASS_K = 3
MAX_TASKS = 40  # rows of the table of failing tasks
MAX_TEXT = 80  # characters of an error or a task
SHOWN_OPTIONS = (
    "model_name",
    "env",
    "tasks_dir",
    "backend",
    "learning_rate",
    "lora_rank",
    "batch_size",
    "group_size",
    "loss_fn",
    "temperature",
    "checkpoint",
    "n_samples",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """The training signal of one environment or of all tasks: how much the rewards within groups vary."""

    variances: Sequence[float]  # `variance_per_prompt` of each step

    @property
    def mean(self) -> float:
        return fmean(self.variances)

    @property
    def share(self) -> float:
        """The share of steps with a variance above 0."""
        return fmean(variance > 0 for variance in self.variances)

    @property
    def halves(self) -> list[float]:
        """The mean of the first and of the second half of the steps."""
        middle = (len(self.variances) + 1) // 2
        return [fmean(part) for part in (self.variances[:middle], self.variances[middle:]) if part]


def run_section(run: AnalyzedRun) -> list[str]:
    options = [f"{name}={run.options[name]}" for name in SHOWN_OPTIONS if run.options.get(name) is not None]
    lines = [f"## {run.name}", ""]
    if options:
        lines += [f"`{' '.join(options)}`", ""]
    evaluations, steps = list(run.evaluations.values()), change([str(step) for step in run.evaluations])
    if evaluations:
        lines += [f"### Held-out tasks, step {steps}", "", *held_out_table(evaluations), "", PASS_NOTE]
        lines += [DIFFERENCE_NOTE, ""] if len(evaluations) == 2 else [""]
        lines += [f"### Failed trials by pattern, step {steps}", "", *pattern_table(evaluations), ""]
        lines += [f"### Tasks that fail, step {run.last_step}", "", *task_table(evaluations), ""]
    else:
        lines += ["No evaluation was dumped.", ""]
    if signals := signals_of(run):
        lines += ["### Training signal", "", *signal_table(signals), ""]
    return lines[:-1]


PASS_NOTE = (
    f"A pass is a reward above 0. pass@{PASS_K} is the unbiased estimate over tasks with at least {PASS_K} "
    "graded trials."
)
DIFFERENCE_NOTE = (
    "Difference: success (a reward of at least 1) of the last evaluation minus that of the first, paired by "
    "task, with its 95 % interval and the p-value of the exact sign-flip test."
)


def held_out_table(evaluations: Sequence[Sequence[DumpedTrial]]) -> list[str]:
    header = ["environment", "tasks", "trials", "avg turns", "avg tool calls", "pass@1", f"pass@{PASS_K}"]
    has_change = len(evaluations) == 2
    rows = []
    for name in environments(evaluations[-1]):
        trials_by_step = [of_environment(trials, name) for trials in evaluations]
        cells = [
            [number(mean([trial.num_turns for trial in trials])) for trials in trials_by_step],
            [number(mean([trial.num_tool_calls for trial in trials])) for trials in trials_by_step],
            [percent(pass_rate(trials, 1)) for trials in trials_by_step],
            [percent(pass_rate(trials, PASS_K)) for trials in trials_by_step],
        ]
        last = trials_by_step[-1]
        row = [name, str(len(by_task(last))), str(len(last)), *map(change, cells)]
        rows.append([*row, difference(compared(*trials_by_step))] if has_change else row)
    return table([*header, "difference"] if has_change else header, rows)


def pattern_table(evaluations: Sequence[Sequence[DumpedTrial]]) -> list[str]:
    """Return a table with the number of failed trials per pattern (rows) and environment (columns)."""
    names = environments(evaluations[-1])
    trials_by_step = [[of_environment(trials, name) for trials in evaluations] for name in names]
    columns = [
        [pattern_counts([trial.trajectory for trial in trials]) for trials in steps]
        for steps in trials_by_step
    ]
    shown = [pattern for pattern in Pattern if any(cell[pattern] for column in columns for cell in column)]
    failed = [[str(num_failed(trials)) for trials in steps] for steps in trials_by_step]
    rows = [["failed trials", *(change(cells) for cells in failed)]]
    for pattern in sorted(shown, key=lambda pattern: -columns[0][-1][pattern]):
        cells = [[str(counts[pattern]) for counts in column] for column in columns]
        rows.append([str(pattern).replace("_", " "), *(change(texts) for texts in cells)])
    return table(["pattern", *names], rows)


def task_table(evaluations: Sequence[Sequence[DumpedTrial]]) -> list[str]:
    """Return a table of the tasks with failed trials, by decreasing failure rate. A row describes one failed
    trial of its task as an example."""
    groups = [by_task(trials) for trials in evaluations]
    failing = [(task, trials) for task, trials in groups[-1].items() if num_failed(trials)]
    if not failing:
        return ["Every trial solved its task."]
    failing.sort(key=lambda item: (-num_failed(item[1]) / len(item[1]), item[0]))
    rows = []
    for task, trials in failing[:MAX_TASKS]:
        solved = [solved_text(group.get(task, [])) for group in groups]
        failed = [trial for trial in trials if trial.reward < SOLVED]
        counts = Counter(pattern for trial in failed for pattern in patterns(trial.trajectory))
        shown = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.most_common())
        example = failed[0]
        summary = f"`{example.trajectory.trial_name or MISSING}`: {calls_text(example)}"
        if error := last_error(example):
            summary += f"; `{error}`"
        rows.append([trials[0].environment, task_text(task), change(solved), shown or MISSING, summary])
    header = ["environment", "task", "solved", "patterns", "a failed trial"]
    more = [f"{len(failing) - MAX_TASKS} more tasks fail."] if len(failing) > MAX_TASKS else []
    return [*table(header, rows, num_text=5), *(["", *more] if more else [])]


def signal_table(signals: dict[str, Signal]) -> list[str]:
    rows = [
        [
            name,
            number(signal.mean, digits=4),
            change([number(value, digits=4) for value in signal.halves]),
            percent(signal.share),
            str(len(signal.variances)),
            "yes" if signal.share >= MIN_SIGNAL else "too hard or too easy for this model",
        ]
        for name, signal in signals.items()
    ]
    header = ["environment", "avg variance", "first → second half", "steps with signal", "steps"]
    return table([*header, f"at least {MIN_SIGNAL:.0%}"], rows)


def signals_of(run: AnalyzedRun) -> dict[str, Signal]:
    """Return the signal of all tasks and of each environment. The result is empty without training steps."""
    if run.metrics_file is None:
        return {}
    variances = recorded_variances(run.metrics_file)
    ordered = sorted(variances.items(), key=lambda item: (item[0] != ALL_TASKS, item[0]))
    return {name: Signal(variances=values) for name, values in ordered}


def environments(trials: Sequence[DumpedTrial]) -> list[str]:
    """Return the environments of an evaluation. If there are several, ALL_TASKS is the first element."""
    names = sorted({trial.environment for trial in trials})
    return [ALL_TASKS, *names] if len(names) > 1 else names


def of_environment(trials: Sequence[DumpedTrial], name: str) -> list[DumpedTrial]:
    return [trial for trial in trials if name in (ALL_TASKS, trial.environment)]


def by_task(trials: Sequence[DumpedTrial]) -> dict[str, list[DumpedTrial]]:
    groups: defaultdict[str, list[DumpedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.task].append(trial)
    return dict(groups)


def pass_rate(trials: Sequence[DumpedTrial], k: int) -> float | None:
    """Return SkyRL's pass@k, which counts every reward above 0 as a pass.

    Tasks with fewer than `k` trials are left out. If no task is left, the result is None.
    """
    tallies = [
        Tally(solved=sum(trial.reward > 0 for trial in group), graded=len(group))
        for group in by_task(trials).values()
    ]
    return mean([pass_at_k(tally, k) for tally in tallies if tally.graded >= k])


def compared(first: Sequence[DumpedTrial], second: Sequence[DumpedTrial]) -> Comparison | None:
    """Compare the success of two evaluations, paired by task; None if they share no task."""
    before, after = by_task(first), by_task(second)
    common = [task for task in before if task in after]
    if not common:
        return None
    return compare_paired(
        *(
            [
                Tally(solved=len(trials[task]) - num_failed(trials[task]), graded=len(trials[task]))
                for task in common
            ]
            for trials in (before, after)
        )
    )


def difference(comparison: Comparison | None) -> str:
    if comparison is None:
        return MISSING
    value = comparison.difference
    return (
        f"{100 * value.value:+.1f} points [{100 * value.low:+.1f}, {100 * value.high:+.1f}], "
        f"p = {comparison.p_value:.3g}"
    )


def num_failed(trials: Sequence[DumpedTrial]) -> int:
    return sum(trial.reward < SOLVED for trial in trials)


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def solved_text(trials: Sequence[DumpedTrial]) -> str:
    return f"{len(trials) - num_failed(trials)}/{len(trials)}" if trials else MISSING


def calls_text(trial: DumpedTrial) -> str:
    """Return the calls of a trial in their order: `get_order, cancel_order x2`."""
    names = [
        call["function"]["name"]
        for message in trial.trajectory.conversation
        for call in message.get("tool_calls") or ()  # type: ignore[attr-defined]
    ]
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs) or "no call"


def last_error(trial: DumpedTrial) -> str:
    """Return the last error message in the tool results, shortened; empty if there is none."""
    results = tool_results(trial.trajectory)
    lines = [line for text in results for line in text.splitlines() if result_patterns(line)]
    return shortened(lines[-1]) if lines else ""


def task_text(task: str) -> str:
    return shortened(" ".join(task.split()))


def shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
