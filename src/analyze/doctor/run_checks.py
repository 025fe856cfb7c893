"""Checks of a run. They read its config.json, metrics.jsonl, journal, rollouts/ and logs.log, and the log and
the server.json of its server.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, variance

from src.analyze.doctor.machine_checks import sandbox
from src.analyze.doctor.problems import (
    KL_GROWTH,
    MAX_BASE_KL,
    MAX_FAILED,
    MAX_SAMPLER_KL,
    MAX_TRUNCATED,
    MAX_WITHOUT_UPDATE,
    MIN_MIXED_GROUPS,
    MIN_STEPS,
    NOISE_ERRORS,
    RECENT_STEPS,
    SATURATED,
    Finding,
    ProblemName,
    problem_finding,
)
from src.analyze.show import RecordedTrial, recorded_trials
from src.core.errors import ConfigError
from src.core.trajectory import StopReason
from src.records.journal import RunState, last_end
from src.records.run_directory import METRICS_FILE, read_config
from src.records.tracking import recorded

OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)
CUT = (StopReason.LENGTH, StopReason.CONTEXT_LENGTH)
KL_LIMITS = {"optim/kl_sample_train_v2": MAX_SAMPLER_KL, "optim/kl_policy_base": MAX_BASE_KL}
LOCAL = ("auto", "docker", "sandbox")  # values of environment_type whose trials run on this machine
MAX_SHOWN = 200  # maximum number of characters of an error message in a finding


class CheckedRun:
    """The run that is checked, as read from its files.

    Raises ConfigError if `directory` has no run or if the file `server_log` does not exist.
    """

    def __init__(self, directory: str, *, server_log: str | None = None) -> None:
        self.path = Path(directory).expanduser().resolve()
        self.options = read_config(self.path)
        self.trials = [trial for trial in recorded_trials(self.path) if not trial.name.startswith("eval_")]
        server_directory = self.path.with_name(f"{self.path.name}.server")
        self.server_log = Path(server_log).expanduser() if server_log else server_directory / "server.log"
        if server_log and not self.server_log.is_file():
            raise ConfigError(f"server_log={server_log}: no such file; give the log of the server")
        self.base_model = _base_model(server_directory / "server.json") or str(self.options.get("model_name"))

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric in the training steps, in order."""
        values = recorded(self.path / METRICS_FILE, name)
        return [value for step, value in sorted(values.items()) if step > 0]

    def recent_trials(self) -> list[RecordedTrial]:
        last_step = max((trial.step for trial in self.trials), default=0)
        return [trial for trial in self.trials if trial.step > last_step - RECENT_STEPS]

    @property
    def more_mixed_groups(self) -> dict[str, str]:
        """The values of the placeholders `more_mixed_groups` and `new_run` of a command. With these values,
        the command runs steps in which more groups have differing rewards.

        The command sets `dynamic_sampling`. If the run has set `dynamic_sampling` or an option that excludes
        it, the command starts a new run with larger groups instead."""
        excluding = ("stream_groups", "max_staleness", "domain_mixture", "remove_constant_reward_groups")
        is_set = self.options.get("dynamic_sampling", "off") != "off"
        if is_set or any(self.options.get(name) for name in excluding):
            size = 2 * int(self.options.get("group_size") or 8)
            new_run = f"log_path={self.path}-group_size-{size}"
            return {"more_mixed_groups": f"group_size={size}", "new_run": new_run}
        return {"more_mixed_groups": "dynamic_sampling=filter", "new_run": ""}

    def problem(self, name: ProblemName, measured: str, **values: str) -> Finding:
        """Return `problem_finding` with the directory of the run as the value of `run`."""
        return problem_finding(name, measured, run=str(self.path), **values)

    def scaled_rate(self, factor: float) -> str:
        return f"{float(self.options.get('learning_rate') or 1e-4) * factor:g}"


def run_findings(run: CheckedRun) -> list[Finding]:
    findings = [check(run) for check in CHECKS]
    is_local = run.options.get("environment_type", "auto") in LOCAL
    if run.options.get("env", "harbor") == "harbor" and is_local:
        findings.append(sandbox())
    return findings


def reward(run: CheckedRun) -> Finding:
    """Compare the rewards in the last third of the steps with the rewards in the first third."""
    values = run.metric("env/all/reward/total")
    if len(values) < MIN_STEPS:
        return Finding(name="reward", measured=f"{len(values)} steps; a trend needs {MIN_STEPS}")
    first, last = thirds(values)
    gain = fmean(last) - fmean(first)
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    measured = f"{fmean(first):.3f} in the first third of {len(values)} steps, {fmean(last):.3f} in the last"
    largest = max(run.metric("env/all/reward/max"), default=0.0)
    is_solved = largest > 0 and fmean(last) >= SATURATED * largest
    if is_solved or gain > NOISE_ERRORS * error:
        return Finding(name="reward", measured=measured)
    measured += f" (standard error of the difference {error:.3f})"
    return run.problem(ProblemName.REWARD_FLAT, measured, higher_rate=run.scaled_rate(2))


def groups(run: CheckedRun) -> Finding:
    """Check that the share of groups with differing rewards is at least MIN_MIXED_GROUPS."""
    mixed = run.metric("env/all/by_group/frac_mixed")[-RECENT_STEPS:]
    if not mixed:
        return Finding(name="groups", measured="no step with graded trials yet")
    measured = f"{fmean(mixed):.0%} of the groups of the last {len(mixed)} steps have differing rewards"
    if fmean(mixed) >= MIN_MIXED_GROUPS:
        return Finding(name="groups", measured=measured)
    shares = {
        kind: run.metric(f"env/all/by_group/{name}")[-RECENT_STEPS:]
        for kind, name in (("below 0.5", "frac_all_bad"), ("at least 0.5", "frac_all_good"))
    }
    parts = [
        f"in {fmean(values):.0%}, all rewards are equal and {kind}"
        for kind, values in shares.items()
        if values
    ]
    return run.problem(ProblemName.GROUPS_ALIKE, "; ".join([measured, *parts]), **run.more_mixed_groups)


def updates(run: CheckedRun) -> Finding:
    """Compare the share of steps that did not change the weights with MAX_WITHOUT_UPDATE."""
    recent = run.metric("optim/num_substeps")[-RECENT_STEPS:]
    if not recent:
        return Finding(name="updates", measured="no finished step yet")
    num_without = recent.count(0)
    measured = f"{num_without} of the last {len(recent)} steps did not change the weights"
    if num_without <= MAX_WITHOUT_UPDATE * len(recent):
        return Finding(name="updates", measured=measured)
    return run.problem(ProblemName.NO_UPDATE, measured, **run.more_mixed_groups)


def kl(run: CheckedRun) -> Finding:
    """Compare the KL divergences of the last third of the steps with KL_LIMITS and with the first third."""
    measurements = []
    for name, limit in KL_LIMITS.items():
        values = run.metric(name)
        if len(values) < MIN_STEPS:
            continue
        first, last = (fmean(third) for third in thirds(values))
        measured = f"{name} {first:.2g} in the first third of the steps, {last:.2g} in the last"
        if last > limit and last >= KL_GROWTH * first:
            return run.problem(ProblemName.KL_RISING, measured, lower_rate=run.scaled_rate(0.5))
        measurements.append(measured)
    return Finding(name="KL", measured="; ".join(measurements) or f"a trend needs {MIN_STEPS} steps")


def truncated(run: CheckedRun) -> Finding:
    """Compare the share of truncated trials with MAX_TRUNCATED."""
    graded = [trial.line for trial in run.recent_trials() if "failure" not in trial.line]
    if not graded:
        return Finding(name="answers", measured="no graded trial yet")
    cuts = [line.get("stop_reason") for line in graded if line.get("stop_reason") in CUT]
    measured = f"{len(cuts)} of the last {len(graded)} graded trials were cut by a length limit"
    if len(cuts) <= MAX_TRUNCATED * len(graded):
        return Finding(name="answers", measured=measured)
    # The first option of each pair takes precedence over the second.
    options = ("max_generate_length", "max_tokens")
    if StopReason.LENGTH not in cuts:
        options = ("max_input_length", "context_limit")
    option = next((name for name in options if run.options.get(name)), options[1])
    more = f"{option}={2 * int(run.options.get(option) or 1024)}"
    return run.problem(ProblemName.TRUNCATED, measured, more_tokens=more)


def failures(run: CheckedRun) -> Finding:
    """Compare the share of ungraded trials with MAX_FAILED, and check that they did not end the run.

    The share counts only the trials of finished steps, but a run may also end in an unfinished step."""
    ungraded = [trial.line for trial in run.trials if "failure" in trial.line]
    is_small = len(ungraded) <= MAX_FAILED * len(run.trials)
    end = last_end(run.path)
    if end is not None and end.state == RunState.TOO_MANY_FAILURES and is_small:
        return run.problem(ProblemName.FAILURES, f"the run ended: {end.cause[:MAX_SHOWN]}", trial="")
    if not run.trials:
        return Finding(name="failures", measured="no finished step yet")
    measured = f"{len(ungraded)} of {len(run.trials)} trials could not be graded"
    if is_small:
        return Finding(name="failures", measured=measured)
    (kind, count), *_ = Counter(line.get("failure", "") for line in ungraded).most_common(1)
    line = next(line for line in ungraded if line.get("failure") == kind)
    message = (line.get("message", "").splitlines() or [""])[0][:MAX_SHOWN]
    measured += f", {count} of kind {kind}: {message}"
    return run.problem(ProblemName.FAILURES, measured, trial=line["trial"] or line["task"])


def memory(run: CheckedRun) -> Finding:
    """Search the logs of the server and the run for failed allocations."""
    logs = [path for path in (run.server_log, run.path / "logs.log") if path.is_file()]
    for path in logs:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if OUT_OF_MEMORY.search(line)]
        if lines:
            number, line = lines[-1]
            measured = (
                f"lines of {path} with a failed allocation: {len(lines)}; the last one is line {number}: "
                f"{line.strip()[:MAX_SHOWN]}"
            )
            return run.problem(ProblemName.OUT_OF_MEMORY, measured, base_model=run.base_model)
    searched = ", ".join(path.name for path in logs) or "no log; give server_log=FILE"
    return Finding(name="memory", measured=f"no failed allocation in {searched}" if logs else searched)


CHECKS: Sequence[Callable[[CheckedRun], Finding]] = (reward, groups, updates, kl, truncated, failures, memory)


def thirds(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last third of `values`.

    >>> thirds([1, 2, 3, 4, 5, 6, 7])
    ([1, 2], [6, 7])
    """
    count = len(values) // 3
    return values[:count], values[-count:]


def _base_model(server_file: Path) -> str | None:
    """Return the base model of the server that the launcher started for the run; None if the
    launcher started no server."""
    try:
        arguments = json.loads(server_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    texts = [argument for argument in arguments if isinstance(argument, str)]
    return next((text.partition("=")[2] for text in texts if text.startswith("base_model=")), None)
