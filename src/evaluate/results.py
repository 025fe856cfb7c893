"""What an evaluation leaves: results.json, the lines a person reads, and the comparison of two of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from pydantic import TypeAdapter

from src.core.errors import ConfigError, TooManyFailuresError
from src.core.trajectory import TrajectoryGroup
from src.evaluate.config import EvaluateConfig
from src.evaluate.contamination import content_hash
from src.evaluate.eval_stats import Comparison, Estimate, Tally, compared
from src.evaluate.evaluation import Evaluation, tally
from src.records.atomic_io import replace_text
from src.records.reading import Count, read_document, same
from src.rollouts.run_events import RunEvents

MAX_DOMAINS = 5  # with more domains only the results of all tasks are reported

RESULTS_FILE = "results.json"
SPLIT = {"success_write": "take a writing action", "success_nowrite": "take none"}


class TaskResult(TypedDict):
    """What a comparison needs of a task."""

    content: str
    solved: Count
    graded: Count


class Results(TypedDict):
    """What a comparison needs of results.json."""

    evaluated: str
    tasks: list[TaskResult]


def results_of(name: str, config: EvaluateConfig, result: Evaluation) -> dict[str, Any]:
    return {
        "evaluated": name,
        "tasks_dir": config.tasks_dir,
        "settings": {"n_samples": config.n_samples, "temperature": config.temperature, "seed": config.seed},
        **asdict(result.whole),
        "domains": {name: asdict(block) for name, block in result.domains.items()},
        "tasks": [task_record(group) | floor_record(group, result.floors) for group in result.groups],
        "metrics": result.metrics,
    }


def task_record(group: TrajectoryGroup) -> dict[str, Any]:
    failures = Counter(str(failure.kind) for failure in group.failures)
    return {
        "id": group.task.id,
        "content": content_hash(group.task),
        **asdict(tally(group)),
        "rewards": group.rewards,
        "failures": dict(failures),
    }


def floor_record(group: TrajectoryGroup, floors: Mapping[str, float]) -> dict[str, float]:
    return {"floor": floors[group.task.id]} if group.task.id in floors else {}


def report(results: Mapping[str, Any], events: RunEvents) -> None:
    """What was found, the trials without a grade in a line of their own."""
    metrics = results["metrics"]
    report_block(results, "test/env/all", metrics, events)
    for name, block in results["domains"].items() if 1 < len(results["domains"]) <= MAX_DOMAINS else ():
        events.say(f"{name}:")
        report_block(block, f"test/env/{name}", metrics, events, indent="  ")
    stops = {
        name.rpartition("/")[2]: value
        for name, value in metrics.items()
        if name.startswith("test/env/all/stop_reason/")
    }
    calls = metrics.get("test/env/all/tool_calls")
    events.say(
        f"per trial: {metrics['test/env/all/turns']:.1f} turns"
        + ("" if calls is None else f", {calls:.1f} tool calls")
        + "; ended by "
        + ", ".join(f"{name} {share:.0%}" for name, share in stops.items())
    )
    failed = sum((Counter(task["failures"]) for task in results["tasks"]), Counter())
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(failed.items()))
    graded = sum(task["graded"] for task in results["tasks"])
    events.say(
        f"trials: {graded} graded"
        + (f", {failed.total()} without a grade, in no rate above: {kinds}" if failed else "")
    )


def report_block(
    block: Mapping[str, Any],
    prefix: str,
    metrics: Mapping[str, float],
    events: RunEvents,
    *,
    indent: str = "",
) -> None:
    """Rates, what doing nothing solves, success by what the tasks take, and how the failed trials failed."""
    for name, rate in block["rates"].items():
        events.say(f"{indent}{name.replace('_hat_', '^').replace('_at_', '@')}: {shown(Estimate(**rate))}")
    if block["floor"] is not None:
        events.say(f"{indent}doing nothing: {shown(Estimate(**block['floor']))}")
    split = {text: metrics.get(f"{prefix}/{name}") for name, text in SPLIT.items()}
    parts = [
        f"{value:.1%} of trials at tasks that {text}" for text, value in split.items() if value is not None
    ]
    if parts:
        events.say(f"{indent}solved: {', '.join(parts)}")
    shares = sorted(((count, name) for name, count in block["patterns"].items() if count), reverse=True)
    if shares:
        counted = ", ".join(f"{name.replace('_', ' ')} {count}" for count, name in shares)
        events.say(f"{indent}of {block['num_failed']} failed trials: {counted}")


def require_enough(results: Mapping[str, Any], config: EvaluateConfig, directory: Path) -> None:
    lost = sum(sum(task["failures"].values()) for task in results["tasks"])
    total = lost + sum(task["graded"] for task in results["tasks"])
    if lost > config.max_failure_rate * total:
        raise TooManyFailuresError(
            f"{lost} of {total} trials had no grade, more than max_failure_rate={config.max_failure_rate:g}; the rest is no fair sample: "
            f"mend the cause and repeat with the same log_path={directory}"
        )


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], events: RunEvents, *, write_to: Path | None = None
) -> Comparison:
    """Task by task, those of equal content: what the second solves that the first does not. ConfigError where they share no task."""
    before, after = (
        {task["content"]: task for task in results["tasks"] if task["graded"]} for results in (first, second)
    )
    common = [content for content in before if content in after]
    if not common:
        raise ConfigError(
            "the two evaluations share no graded task, by content; compare evaluations of the same tasks"
        )
    pairs = [
        [Tally(solved=side[content]["solved"], graded=side[content]["graded"]) for content in common]
        for side in (before, after)
    ]
    comparison = compared(*pairs)
    if write_to is not None:
        write_json(
            write_to,
            {"first_name": first["evaluated"], "second_name": second["evaluated"], **asdict(comparison)},
        )
    events.say(f"{first['evaluated']} -> {second['evaluated']}, paired over {len(common)} tasks")
    left_out = len(before) + len(after) - 2 * len(common)
    if left_out:
        events.say(f"left out: {left_out} tasks that only one of them has graded")
    difference = comparison.difference
    events.say(
        f"success {comparison.first:.1%} -> {comparison.second:.1%}, difference {100 * difference.value:+.1f} points "
        f"[{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]; {comparison.num_better} tasks better, {comparison.num_worse} worse; "
        f"p = {comparison.p_value:.3g} (exact sign-flip test)"
    )
    return comparison


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}] over {estimate.num_tasks} tasks"


def read_results(path: Path) -> Mapping[str, Any]:
    path = path.expanduser()
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} holds no {RESULTS_FILE} of an evaluation; give the folder of one")
    return read_document(file, TypeAdapter(Results), same)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=1) + "\n")
