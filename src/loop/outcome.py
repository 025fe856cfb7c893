"""The last lines that a run prints, and the error of a run that has trained nothing.

The numbers are read from metrics.jsonl. The example of a failure is read from rollouts/.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from src.core.errors import NothingTrainedError
from src.core.trajectory import ZeroReason
from src.evaluate.evaluation import MAX_DOMAINS
from src.records.metrics_table import ALL_TASKS
from src.records.tracking import recorded, recorded_variances

# If rewards differ within groups in less than this share of the steps, the tasks do not suit the model.
MIN_SIGNAL = 0.25
# Reasons of a reward 0 for which the environment or the verifier may be at fault.
GRADING_ERROR_REASONS = (
    ZeroReason.ENV_ERROR,
    ZeroReason.VERIFIER_ERROR,
    ZeroReason.VERIFIER_TIMEOUT,
    ZeroReason.NO_REWARD,
    ZeroReason.UNREADABLE_REWARD,
)
# The files of a run that the last line lists.
FILES = ("metrics.jsonl", "checkpoints.jsonl", "rollouts/", "dumped_evals/", "jobs/", "logs.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Held-out success rates of a run. A rate is None if it was not measured or if no task is held out."""

    before: float | None
    after: float | None
    noop_success: float | None  # the success rate of an agent that does nothing
    is_partial: bool = False  # whether the rates use only a part of a benchmark's grading
    # Mean reward before and after training; None if it equals the success rate or step 0 was not evaluated.
    rewards: tuple[float, float] | None = None


class StepLimits(Protocol):
    """The options that limit the number of steps of a run."""

    @property
    def max_steps(self) -> int | None: ...
    @property
    def n_epochs(self) -> int: ...


def report(
    log_path: Path, *, wall_s: float, steps_before: int, group_size: int, options: StepLimits
) -> list[str]:
    """Return the last lines that a training process prints.

    `wall_s` is the duration of the process in seconds. `steps_before` is the number of steps that earlier
    processes of the run have done.
    """
    metrics_file = log_path / "metrics.jsonl"
    lines = success_lines(success_of(metrics_file))
    if group_size > 1:  # in groups of one trial, all variances are 0
        lines += training_signal_lines(recorded_variances(metrics_file))
    return last_lines(
        lines,
        steps=max(recorded(metrics_file, "progress/batch"), default=0),
        steps_before=steps_before,
        wall_s=wall_s,
        log_path=log_path,
        options=options,
    )


def require_trained(log_path: Path, *, group_size: int) -> None:
    """Raise NothingTrainedError if no step of the run has changed the weights."""
    metrics_file = log_path / "metrics.jsonl"
    num_updates = recorded(metrics_file, "optim/num_substeps")
    if not num_updates or any(num_updates.values()):
        return
    num_trials = sum(recorded(metrics_file, "trials/total").values())
    num_failed = sum(recorded(metrics_file, "trials/ungraded").values())
    for reason in GRADING_ERROR_REASONS:
        num_failed += sum(recorded(metrics_file, f"trials/graded_zero/{reason}").values())
    if num_trials and num_failed == num_trials:
        raise NothingTrainedError(
            f"none of the {num_trials:.0f} training trials could be graded, so nothing was trained; "
            f"{first_failure(log_path)}see {log_path / 'logs.log'}"
        )
    rewards = recorded(metrics_file, "env/all/reward/total").values()
    if group_size == 1:
        cause = "no example has an advantage; see groups/dropped/*, advantage/* and batch/* in metrics.jsonl"
    elif any(recorded(metrics_file, "reward/signal_ratio").values()):
        cause = (
            "filters, reward rules or masks left nothing to train in the groups whose rewards differ; see "
            "groups/dropped/*, reward/zeroed_by_* and batch/* in metrics.jsonl"
        )
    else:
        mean = sum(rewards) / max(1, len(rewards))
        cause = (
            f"in every group, all trials have the same reward (mean of all trials {shown_reward(mean)}); "
            "choose easier or harder tasks, another reward or a larger group_size"
        )
    raise NothingTrainedError(f"nothing was trained in {counted(len(num_updates), 'step')}: {cause}")


def first_failure(log_path: Path) -> str:
    """Return the first recorded failure or graded-zero detail of a training trial, as a clause of a message.

    Returns "" if there is none.
    """
    for path in sorted((log_path / "rollouts").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if text := record.get("message") or record.get("zero_detail"):
                return f"e.g. {record['task']}: {(text.splitlines() or [''])[0]}; "
    return ""


def success_of(metrics_file: Path) -> Success:
    """Return the held-out success rates of the run before and after training."""
    rates = recorded(metrics_file, "test/env/all/success")
    noop_rates = recorded(metrics_file, "test/noop_success")
    rewards = recorded(metrics_file, "test/env/all/reward/total")
    differs_from_success = any(
        not math.isclose(reward, rates.get(step, reward), abs_tol=1e-9) for step, reward in rewards.items()
    )
    return Success(
        before=rates.get(0),
        after=rates[max(rates)] if rates else None,
        noop_success=noop_rates[max(noop_rates)] if noop_rates else None,
        # With a partial grading, the name of the rate contains the name of the part: test/<part>_pass_at_1.
        is_partial=not recorded(metrics_file, "test/pass_at_1"),
        rewards=(rewards[0], rewards[max(rewards)]) if 0 in rewards and differs_from_success else None,
    )


def success_lines(success: Success) -> list[str]:
    """Return the line about the success of a run; none if a rate is unknown."""
    before, after = success.before, success.after
    if before is None or after is None:
        return []
    noop = ""
    if success.noop_success is not None:
        noop = f"; an agent that does nothing: {success.noop_success:.1%}"
    rewards = ""
    if success.rewards is not None:
        rewards = "; mean reward {} before, {} after".format(*map(shown_reward, success.rewards))
    return [
        f"{success_name(success.is_partial)}: {before:.1%} before, {after:.1%} after "
        f"({100 * (after - before):+.1f} points){rewards}{noop}"
    ]


def last_lines(
    results: Sequence[str],
    *,
    steps: int,
    steps_before: int,
    wall_s: float,
    log_path: Path,
    options: StepLimits,
) -> list[str]:
    """Return the last lines of a run: its steps and duration, `results` and its files.

    If a resumed run had no step left, the first line names the options that add steps, with values.
    """
    files = [name for name in FILES if (log_path / name).exists()]
    total = f" ({steps} in total)" if steps_before else ""
    first = f"done: {counted(steps - steps_before, 'step')}{total} in {_duration(wall_s)}"
    if steps == steps_before:
        more = f"n_epochs={2 * options.n_epochs}"
        if steps == options.max_steps:  # both options are named, because the epochs may have no more steps
            more = f"max_steps={2 * steps} {more}"
        first = f"nothing to do: all {counted(steps, 'step')} are finished; add {more} to train further"
    return [first, *results, f"files: {log_path} ({', '.join(files)})"]


def resume_command(log_path: Path) -> str:
    """Return the command that continues a run. Its paths may be relative to the working directory."""
    return shlex.join([agent_trainer(), "resume", str(log_path)])


def agent_trainer() -> str:
    """Return the path of `agent-trainer`, relative to the working directory if that contains the program."""
    program = Path(sys.executable).with_name("agent-trainer")
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def training_signal_lines(variances: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a line for all tasks, and a line for each domain if there are 2 to MAX_DOMAINS domains."""
    domains = {name: values for name, values in variances.items() if name != ALL_TASKS}
    shown = domains if 1 < len(domains) <= MAX_DOMAINS else {}
    return [
        training_signal_line(name, values)
        for name, values in variances.items()
        if name == ALL_TASKS or name in shown
    ]


def training_signal_line(name: str, variances: Sequence[float]) -> str:
    """Return one line about the variance of the rewards within the groups of each step.

    A group of four trials has the variance 0.25 with two successes, and 0.1875 with one success.

    >>> training_signal_line("retail", [0.1875, 0.0])
    'training signal of retail: rewards differ within a group in 1 of 2 steps, mean variance 0.0938'
    >>> training_signal_line("retail", [2e-7])
    'training signal of retail: rewards differ within a group in 1 of 1 step, mean variance 2e-07'
    """
    num_steps = len(variances)
    num_with_signal, mean = sum(variance > 0 for variance in variances), sum(variances) / num_steps
    steps = f"{num_with_signal} of {counted(num_steps, 'step')}"
    verdict = (
        ""
        if num_with_signal / num_steps >= MIN_SIGNAL
        else "; the tasks are too hard or too easy for this model"
    )
    return (
        f"training signal of {name}: rewards differ within a group in {steps}, mean variance "
        f"{mean:.3g}{verdict}"
    )


def success_name(is_partial: bool) -> str:
    return "held-out success, graded in part" if is_partial else "held-out success"


def shown_reward(reward: float) -> str:
    """Return the reward with at most three significant digits, or without decimals from 100 on.

    >>> shown_reward(0.00125), shown_reward(0.5), shown_reward(0.6251), shown_reward(1234.5)
    ('0.00125', '0.5', '0.625', '1234')
    """
    return f"{reward:.0f}" if abs(reward) >= 100 else f"{reward:.3g}"


def counted(count: int, noun: str) -> str:
    """Return the count with its noun.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
