"""results.json of an evaluation, its printed report, and the comparison of two evaluations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired, TypedDict

from pydantic import TypeAdapter

from src.core.errors import ConfigError, TooManyFailuresError
from src.core.trajectory import TrajectoryGroup
from src.evaluate.config import RESULTS_FILE, EvaluateConfig
from src.evaluate.contamination import content_hash
from src.evaluate.eval_stats import Comparison, Estimate, Tally, compare_paired, mean_difference
from src.evaluate.evaluation import MAX_DOMAINS, EvalSection, Evaluation, tally
from src.records.atomic_io import RUN_AGAIN, replace_text
from src.records.metrics_table import with_aliases
from src.records.reading import Count, read_document

SUCCESS_SPLIT = {"success_write": "need a writing action", "success_nowrite": "need none"}


Say = Callable[[str], None]  # prints one line of a report


class TaskResult(TypedDict):
    """The fields of a task in results.json that a comparison reads."""

    content: str
    solved: Count
    graded: Count
    rewards: NotRequired[list[float]]


class Results(TypedDict):
    """The fields of results.json that a comparison reads."""

    evaluated: str
    tasks: list[TaskResult]


def results_of(name: str, config: EvaluateConfig, result: Evaluation) -> dict[str, Any]:
    """Return the content of results.json."""
    return {
        "evaluated": name,
        "tasks_dir": config.tasks_dir,
        "settings": {
            "n_samples": config.n_samples,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "enable_thinking": config.enable_thinking,
            "seed": config.seed,
        },
        **asdict(result.whole),
        "domains": {name: asdict(section) for name, section in result.domains.items()},
        "tasks": [task_record(group, result.noop_rewards) for group in result.groups],
        "metrics": with_aliases(result.metrics),
    }


def task_record(group: TrajectoryGroup, noop_rewards: Mapping[str, float]) -> dict[str, Any]:
    task_id = group.task.id
    record = {
        "id": task_id,
        "content": content_hash(group.task),
        **asdict(tally(group)),
        "rewards": group.rewards,
        "failures": dict(Counter(str(failure.kind) for failure in group.failures)),
    }
    return record | ({"noop_reward": noop_rewards[task_id]} if task_id in noop_rewards else {})


def report(evaluation: Evaluation, say: Say) -> None:
    """Print the results over all tasks, the results of each domain if there are 2 to MAX_DOMAINS domains, and
    statistics of the trials."""
    metrics, domains = evaluation.metrics, evaluation.domains
    is_partial = any(reward not in (0, 1) for group in evaluation.groups for reward in group.rewards)
    report_section(evaluation.whole, "test/env/all", metrics, say, has_partial_rewards=is_partial)
    for name, section in domains.items() if 1 < len(domains) <= MAX_DOMAINS else ():
        say(f"{name}:")
        prefix = f"test/env/{name}"
        report_section(section, prefix, metrics, say, has_partial_rewards=is_partial, indent="  ")
    prefix = "test/env/all/stop_reason/"
    stops = {name.removeprefix(prefix): share for name, share in metrics.items() if name.startswith(prefix)}
    calls = metrics.get("test/env/all/tool_calls")
    say(
        f"per trial: {metrics['test/env/all/turns']:.1f} turns"
        + ("" if calls is None else f", {calls:.1f} tool calls")
        + "; stop reasons: "
        + ", ".join(f"{name} {share:.0%}" for name, share in stops.items())
    )
    failed = Counter(failure.kind for group in evaluation.groups for failure in group.failures)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()))
    say(
        f"trials: {evaluation.num_graded} graded"
        + (f", {failed.total()} ungraded and not in the rates above: {kinds}" if failed else "")
    )


def report_section(
    section: EvalSection,
    prefix: str,
    metrics: Mapping[str, float],
    say: Say,
    *,
    has_partial_rewards: bool,
    indent: str = "",
) -> None:
    """Print the results of one section.

    Most failure patterns describe the tool calls of an agent, so the patterns are printed only if the
    environment reports `tool_calls`.
    """
    if has_partial_rewards:
        say(f"{indent}mean reward: {metrics[f'{prefix}/reward/total']:.3f}")
    for part, sign in (("_at_", "@"), ("_hat_", "^")):
        rates = {name.replace(part, sign): rate for name, rate in section.rates.items() if part in name}
        if rates:
            say(f"{indent}{formatted_rates(rates)}")
    if section.noop_success is not None:
        say(f"{indent}an agent that does nothing: {formatted(section.noop_success)}")
    split = {text: metrics.get(f"{prefix}/{name}") for name, text in SUCCESS_SPLIT.items()}
    parts = [
        f"{value:.1%} of trials of tasks that {text}" for text, value in split.items() if value is not None
    ]
    if parts:
        say(f"{indent}solved: {', '.join(parts)}")
    counts = sorted(((count, name) for name, count in section.patterns.items() if count), reverse=True)
    if counts and f"{prefix}/tool_calls" in metrics:
        listed = ", ".join(f"{name.replace('_', ' ')} {count}" for count, name in counts)
        say(f"{indent}of {section.num_failed} failed trials: {listed}")


def require_enough(evaluation: Evaluation, config: EvaluateConfig, directory: Path) -> None:
    """Raise TooManyFailuresError if more trials are ungraded than `max_failure_rate` allows."""
    num_ungraded = sum(len(group.failures) for group in evaluation.groups)
    total = num_ungraded + evaluation.num_graded
    if num_ungraded > config.max_failure_rate * total:
        raise TooManyFailuresError(
            f"{num_ungraded} of {total} trials are ungraded, more than "
            f"max_failure_rate={config.max_failure_rate:g}; the graded trials are not representative; fix "
            f"the cause and repeat with the same log_path={directory}"
        )


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], say: Say, *, write_to: Path | None = None
) -> Comparison:
    """Compare two evaluations task by task. Tasks with equal content hashes are the same task.

    The difference is `second` minus `first`. `write_to` is the file for the comparison; None: no file is
    written. Raises ConfigError if the evaluations share no graded task.
    """
    before, after = (tallies_by_content(results) for results in (first, second))
    common = [content for content in before if content in after]
    if not common:
        raise ConfigError(
            "no graded task has the same content in both evaluations; compare evaluations of the same tasks"
        )
    pairs = [[tallies[content] for content in common] for tallies in (before, after)]
    comparison = compare_paired(*pairs)
    if write_to is not None:
        names = {"first_name": first["evaluated"], "second_name": second["evaluated"]}
        write_json(write_to, names | asdict(comparison))
    say(
        f"{first['evaluated']} -> {second['evaluated']}, paired over {_tasks(len(common))}; "
        "differences are the second (this evaluation) minus the first (compare_with)"
    )
    left_out = len(before) + len(after) - 2 * len(common)
    if left_out:
        say(f"left out: {left_out} tasks that only one evaluation has graded")
    difference = comparison.difference
    say(
        f"success {comparison.first:.1%} -> {comparison.second:.1%}, "
        f"difference {100 * difference.value:+.1f} points "
        f"[{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]; "
        f"tasks: {comparison.num_better} better, {comparison.num_worse} worse; "
        f"p = {comparison.p_value:.3g} (exact sign-flip test)"
    )
    rewards = [mean_rewards(results) for results in (first, second)]
    if all(content in means for content in common for means in rewards) and has_partial_rewards(
        first, second
    ):
        a, b = ([means[content] for content in common] for means in rewards)
        change = mean_difference([after - before for before, after in zip(a, b, strict=True)])
        say(
            f"mean reward {fmean(a):.3f} -> {fmean(b):.3f}, "
            f"difference {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        )
    return comparison


def has_partial_rewards(*evaluations: Mapping[str, Any]) -> bool:
    """Return whether a trial has a reward other than 0 and 1."""
    tasks = [task for results in evaluations for task in results["tasks"]]
    return any(reward not in (0, 1) for task in tasks for reward in task.get("rewards", []))


def mean_rewards(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean reward of each task with rewards, by content hash. Copies of a task are one task."""
    rewards = dict[str, list[float]]()
    for task in results["tasks"]:
        rewards.setdefault(task["content"], []).extend(task.get("rewards", []))
    return {content: fmean(values) for content, values in rewards.items() if values}


def tallies_by_content(results: Mapping[str, Any]) -> dict[str, Tally]:
    """Return the graded trials of each task, by content hash. Copies of a task count as one task."""
    tallies: dict[str, Tally] = {}
    for task in results["tasks"]:
        if task["graded"]:
            before = tallies.get(task["content"], Tally(solved=0, graded=0))
            tallies[task["content"]] = Tally(
                solved=before.solved + task["solved"], graded=before.graded + task["graded"]
            )
    return tallies


def formatted(estimate: Estimate) -> str:
    return f"{interval(estimate)} over {_tasks(estimate.num_tasks)}"


def formatted_rates(rates: Mapping[str, Estimate]) -> str:
    """Return all rates in one line. The number of tasks is written once if it is the same for all rates."""
    num_tasks = {rate.num_tasks for rate in rates.values()}
    if len(num_tasks) > 1:
        return ", ".join(f"{name}: {formatted(rate)}" for name, rate in rates.items())
    listed = ", ".join(f"{name}: {interval(rate)}" for name, rate in rates.items())
    return f"{listed} over {_tasks(num_tasks.pop())}"


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


def interval(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def read_results(path: Path) -> Mapping[str, Any]:
    """Read the results of an evaluation from its directory or from results.json itself."""
    path = path.expanduser()
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} has no {RESULTS_FILE}; give the directory of an evaluation")
    return read_document(file, TypeAdapter(Results))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=1) + "\n", advice=RUN_AGAIN)
