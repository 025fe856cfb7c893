"""The records that flow through training: Task -> Turn -> Trajectory | TrialFailure -> TrajectoryGroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class StopReason(StrEnum):
    """Why a completion, or a whole trajectory, ended. A sampler only ever says `stop` or `length`."""

    STOP = "stop"  # the agent ended by itself
    LENGTH = "length"  # a completion was cut at max_tokens (trajectory: too many in a row)
    CONTEXT_LENGTH = "context_length"  # the next prompt would not fit in the context
    MAX_TURNS = "max_turns"
    AGENT_TIMEOUT = "agent_timeout"
    SESSION_CLOSED = "session_closed"  # the agent closed its own terminal
    TIMEOUT = "timeout"  # one call of the environment did not come back
    FAILED = "failed"  # the trial could not be graded, and failed_trial_reward stands in for its reward


class ZeroReason(StrEnum):
    """Why a trial has the reward 0 although no verifier said so: the agent prevented its own grading."""

    SANDBOX_BROKEN = "sandbox_broken"  # it ended its sandbox, or left one in which no command runs
    FILES_UNREADABLE = "files_unreadable"  # its files cannot be read or laid down again
    FILES_TOO_LARGE = "files_too_large"
    VERIFIER_TIMEOUT = "verifier_timeout"
    NO_REWARD = "no_reward"  # the verifier wrote none
    UNREADABLE_REWARD = "unreadable_reward"  # what the verifier wrote is no number, or far too long
    VERIFIER_ERROR = "verifier_error"  # the tests could not be uploaded, or their output not be downloaded
    AGENT_ERROR = "agent_error"  # its answers or its terminal ended the code that plays it
    TIMEOUT = "timeout"  # it was still at work at the deadline of the whole trial
    ENV_ERROR = "env_error"  # a message environment raised while it handled the agent's answer


class FailureKind(StrEnum):
    """Why a trial has no usable result: something that the agent cannot cause. None of these is a reward."""

    SANDBOX = "sandbox"
    BACKEND = "backend"
    VERIFIER = "verifier"
    TIMEOUT = "timeout"  # the whole-trial deadline
    AGENT = "agent"
    HARBOR = "harbor"
    ENV_INIT_FAILED = "env_init_failed"  # a message environment could not start
    ENV_ERROR = "env_error"  # a message environment broke on the way


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem to solve. `id` is the group key: all trials of a task form one group."""

    id: str
    path: Path  # its folder, or the file that its row stands in
    instruction: str = ""
    domain: str = ""  # whose metrics it belongs to, e.g. retail; without one, the family that its id names
    row: Mapping[str, object] = field(
        default_factory=dict, hash=False
    )  # what its environment has to know of it
    grading: str = ""  # where only a part of its benchmark's grading counts, the name of the part, which rates of success then carry
    has_writes: bool | None = (
        None  # whether solving it takes an action that changes something; None: nobody says
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One sampled completion, exactly as the sampler saw and returned it."""

    prompt_ids: Sequence[int]  # of the turns of one conversation `TokenIds`, which hold every token once
    completion_ids: list[int]  # the stop token included
    logprobs: list[float]  # one per completion token
    stop_reason: StopReason
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A graded trial."""

    task_id: str
    turns: list[Turn]
    reward: float
    stop_reason: StopReason
    trial_name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # e.g. duration_s, prefix_breaks
    turn_rewards: list[float] = field(
        default_factory=list
    )  # one per turn where rewards came on the way; `reward` is their sum
    conversation: list[Mapping[str, object]] = field(
        default_factory=list
    )  # the messages, for readers; what trains is `turns`
    bonus: float = 0.0  # a judge's, on top of `reward` in training alone: no rate of success knows it
    zero_reason: ZeroReason | None = None  # why `reward` is 0 without a verifier's word; None: it was graded


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFailure:
    """A trial that could not be graded; it leaves the group and is counted by `kind`."""

    task_id: str
    kind: FailureKind
    message: str
    trial_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """All trials of one task, as they were asked for by the step whose batch holds the task."""

    task: Task
    trajectories: list[Trajectory]
    failures: list[TrialFailure] = field(default_factory=list)
    step: int = 0

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]


@dataclass(kw_only=True, slots=True)
class TrialTime:
    """Who used the time of a trial, from its first answer on: the agent and what it set going, or the sampler."""

    started: float  # all by the same clock
    first_answer: float | None = None
    sampling_s: float = 0.0  # since the first answer, what was not answered included

    def agent_used_most(self, now: float) -> bool:
        """
        >>> TimeSpent(started=0, first_answer=2, sampling_s=3).is_mostly_the_agents(12), TimeSpent(started=0).is_mostly_the_agents(12)
        (True, False)
        """
        return (
            self.first_answer is not None
            and now - self.first_answer - self.sampling_s > (now - self.started) / 2
        )
