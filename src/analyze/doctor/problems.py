"""The problems that `agent-trainer doctor` looks for. docs/how-to/troubleshooting.md is generated from
the table PROBLEMS."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

from src.loop.outcome import agent_trainer

MIN_STEPS = 9  # a trend compares the first and the last third of the steps: at least 3 values each
NOISE_ERRORS = 2.0  # a difference below 2 standard errors is not significant at the usual level of 5 %
SATURATED = 0.95  # share of the largest reward; a mean reward above this share can hardly rise
RECENT_STEPS = 10  # checks of the current state use several steps, because one batch is small
MIN_MIXED_GROUPS = 0.2  # below this share, more than four of five groups have equal rewards
MAX_WITHOUT_UPDATE = 0.1  # share of steps that sample rollouts but do not change the weights
KL_GROWTH = 2.0  # mean of the last third of the steps divided by the mean of the first third
MAX_SAMPLER_KL = 0.01  # nats per token; Tinker's documentation calls training below this value stable
MAX_BASE_KL = 0.1  # nats per token: the probability of an answer of 100 tokens changes by a factor of e^10
MAX_TRUNCATED = 0.1  # share of trials; a cut answer is graded without its end, so its reward is unreliable
MAX_FAILED = 0.05  # share of trials; with 8 trials per group, about every third group then lacks a trial
MIN_FREE_GIB = (
    5.0  # a training checkpoint of rank 32 of an 8B model takes about 1 GiB, and each save writes a new one
)


class ProblemName(StrEnum):
    REWARD_FLAT = "reward flat"
    GROUPS_ALIKE = "groups all alike"
    NO_UPDATE = "steps without an update"
    KL_RISING = "KL rising"
    TRUNCATED = "truncated answers"
    FAILURES = "infrastructure failures"
    NO_SANDBOX = "no sandbox"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    sign: str  # what is measured, and the threshold
    meaning: str
    command: str  # the command to type; the names in braces are keys of PLACEHOLDERS


PLACEHOLDERS = {
    "run": "RUN",
    "trial": "TRIAL",
    "higher_rate": "TWICE_THE_RATE",
    "lower_rate": "HALF_THE_RATE",
    "more_mixed_groups": "dynamic_sampling=filter",
    "new_run": "",
    "more_tokens": "max_tokens=TWICE_THE_TOKENS",
    "base_model": "MODEL",
}
"""Placeholder -> the text that docs/how-to/troubleshooting.md shows in place of the value of a run."""

PROBLEMS: dict[ProblemName, Problem] = {
    ProblemName.REWARD_FLAT: Problem(
        sign=f"the run has at least {MIN_STEPS} steps; the mean of `env/all/reward/total` in the last third "
        f"of the steps is at most {NOISE_ERRORS:g} standard errors above the mean in the first third; and "
        f"the mean in the last third is below {SATURATED:.0%} of the largest reward, or no reward is above 0",
        meaning="The policy does not improve. Read some trials; if they are sound, the learning rate is too "
        "low.",
        command="agent-trainer resume {run} learning_rate={higher_rate}",
    ),
    ProblemName.GROUPS_ALIKE: Problem(
        sign=f"the mean of `env/all/by_group/frac_mixed` over the last {RECENT_STEPS} steps is below "
        f"{MIN_MIXED_GROUPS:.0%}",
        meaning="In most groups all rewards are equal: the tasks are too hard or too easy. Such groups have "
        "zero advantages and train nothing, except with `advantage_estimator=reinforce++`. A run keeps its "
        "`group_size`; a command with another `group_size` starts a new run in another `log_path`.",
        command="agent-trainer resume {run} {more_mixed_groups} {new_run}",
    ),
    ProblemName.NO_UPDATE: Problem(
        sign=f"`optim/num_substeps` is 0 in more than {MAX_WITHOUT_UPDATE:.0%} of the last {RECENT_STEPS} "
        "steps",
        meaning="In these steps all rewards of every group were equal, or the filters and masks left nothing "
        "to train, so the weights did not change. Choose easier or harder tasks or a reward with more "
        "values, or sample further tasks in such a step.",
        command="agent-trainer resume {run} {more_mixed_groups} {new_run}",
    ),
    ProblemName.KL_RISING: Problem(
        sign=f"`optim/kl_sample_train_v2` or `optim/kl_policy_base` has values for at least {MIN_STEPS} "
        "steps, and its mean in the last third of these steps is above its limit and at least "
        f"{KL_GROWTH:g} times its mean in the first third; the limits are {MAX_SAMPLER_KL:g} and "
        f"{MAX_BASE_KL:g} nats per token",
        meaning="The updates are too large: the trained policy moves away from the policy that samples, or "
        "from the base model.",
        command="agent-trainer resume {run} learning_rate={lower_rate}",
    ),
    ProblemName.TRUNCATED: Problem(
        sign=f"more than {MAX_TRUNCATED:.0%} of the graded trials of the last {RECENT_STEPS} steps ended "
        "with the stop reason `length` or `context_length`",
        meaning="Answers are cut at `max_tokens`, or trials end early at the context limit.",
        command="agent-trainer resume {run} {more_tokens}",
    ),
    ProblemName.FAILURES: Problem(
        sign=f"more than {MAX_FAILED:.0%} of the training trials of the finished steps could not be graded; "
        "or the run ended because too many trials could not be graded",
        meaning="The sandbox, verifier, environment or server fails, and the groups lose trials.",
        command="agent-trainer show {run} {trial}",
    ),
    ProblemName.NO_SANDBOX: Problem(
        sign="neither Docker nor bubblewrap starts on this machine",
        meaning="Harbor trials cannot run on this machine, and `env=fleet` needs bubblewrap for its "
        "verifiers. tau-bench, `data=` and other message environments need no sandbox.",
        command="sudo apt-get install --yes bubblewrap tmux",
    ),
    ProblemName.OUT_OF_MEMORY: Problem(
        sign="the log of the server or of the run reports `RESOURCE_EXHAUSTED` or `out of memory`",
        meaning="A program of the server did not fit on the device. Lower `max_num_seqs` or "
        "`train_tokens_per_batch` until the printed plan fits.",
        command="agent-trainer serve base_model={base_model} max_num_seqs=16 train_tokens_per_batch=4096 "
        "dry_run=true",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check. A finding with `problem` or `command` reports a problem."""

    name: str
    measured: str
    problem: Problem | None = None
    command: str = ""

    @property
    def is_problem(self) -> bool:
        return self.problem is not None or bool(self.command)

    def lines(self) -> list[str]:
        """Return the lines to print: the measured value and, for a problem, its meaning and the command."""
        lines = [f"{'problem' if self.is_problem else 'ok':8}{self.name}: {self.measured}"]
        if self.problem is not None:
            lines.append(f"{'':8}{self.problem.meaning}")
        if self.is_problem:
            program, space, rest = self.command.partition(" ")
            is_ours = program == "agent-trainer"
            command = f"{shlex.quote(agent_trainer())}{space}{rest}" if is_ours else self.command
            lines.append(f"{'':8}type: {command}")
        return lines


def problem_finding(name: ProblemName, measured: str, **values: str) -> Finding:
    """Return the finding of a problem. `values`, quoted for the shell, replace the placeholders of the
    command. The placeholder of an empty value is removed from the command."""
    problem = PROBLEMS[name]
    quoted = {key: shlex.quote(value) if value else "" for key, value in values.items()}
    command = problem.command.format_map(quoted).strip()
    return Finding(name=name, measured=measured, problem=problem, command=command)


def problem_table() -> str:
    """Return the table of problems in Markdown, for docs/how-to/troubleshooting.md."""
    rows = ["| problem | sign | meaning | command |", "|---|---|---|---|"]
    for name, problem in PROBLEMS.items():
        command = problem.command.format_map(PLACEHOLDERS).strip()
        rows.append(f"| {name} | {problem.sign} | {problem.meaning} | `{command}` |")
    return "\n".join(rows) + "\n"
