"""The records of rollouts and training: Task -> Turn -> Trajectory | TrialFailure -> TrajectoryGroup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class StopReason(StrEnum):
    """Why a completion or a trajectory ended. A completion has only the reasons `stop` and `length`."""

    STOP = "stop"  # completion: a stop token; trajectory: the episode ended
    LENGTH = "length"  # completion: cut at max_tokens; trajectory: its last completion was cut or empty
    CONTEXT_LENGTH = "context_length"  # the next prompt exceeds a limit of the run or of the endpoint
    MAX_TURNS = "max_turns"
    AGENT_TIMEOUT = "agent_timeout"  # Harbor's agent or the whole Harbor trial reached its time limit
    SESSION_CLOSED = "session_closed"  # the agent closed its terminal, or an error ended Harbor's agent
    TIMEOUT = "timeout"  # a tool call of the agent exceeded its deadline
    FAILED = "failed"  # the trial could not be graded; failed_trial_reward is its reward


class ZeroReason(StrEnum):
    """The graded-zero reasons: why a trial that could not be graded has the reward 0.

    The agent caused each of these failures.
    """

    SANDBOX_BROKEN = "sandbox_broken"  # the agent ended its sandbox, or no command can run in it
    FILES_UNREADABLE = "files_unreadable"  # the agent's files cannot be read or restored
    FILES_TOO_LARGE = "files_too_large"
    VERIFIER_TIMEOUT = "verifier_timeout"
    NO_REWARD = "no_reward"  # the verifier wrote no reward
    # The reward is not a finite number, has an absolute value of 1e300 or more, or is in an invalid file.
    UNREADABLE_REWARD = "unreadable_reward"
    VERIFIER_ERROR = "verifier_error"  # the verifier failed, or its tests or output could not be copied
    AGENT_ERROR = "agent_error"  # the agent's answers or terminal caused an error in the trial's code
    TIMEOUT = "timeout"  # the whole trial reached its deadline, and the agent had used most of the time
    ENV_ERROR = "env_error"  # a message environment raised an exception for the agent's answer


class FailureKind(StrEnum):
    """The infrastructure failures. They leave a trial without a reward, and the agent cannot cause them."""

    SANDBOX = "sandbox"
    BACKEND = "backend"
    VERIFIER = "verifier"
    TIMEOUT = "timeout"  # the trial reached its deadline, and ZeroReason.TIMEOUT does not apply
    AGENT = "agent"  # Harbor's agent failed or gave no answer
    HARBOR = "harbor"  # Harbor failed before the setup of the sandbox, or the trial raised an exception
    ENV_INIT_FAILED = "env_init_failed"  # a message environment could not start
    ENV_SERVER = "env_server"  # the server of a message environment failed
    ENV_ERROR = "env_error"  # a message environment failed during the episode, but not because of an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A problem to solve. All trials of a task in one step form a group; `id` identifies the task."""

    id: str
    path: Path  # the directory of the task, or the file that contains the row of the task
    instruction: str = ""
    # Metrics are logged under this name, e.g. retail. If it is empty, they are logged under the task type,
    # which is the id without its directory and number.
    domain: str = ""
    row: Mapping[str, object] = field(default_factory=dict, hash=False)  # data for the environment
    # The name of a grading that checks only some criteria of the task, e.g. `env`; empty: full grading.
    # The names of metrics contain this name.
    grading: str = ""
    # Whether the solution changes the database of the domain; None: unknown, or there is no database.
    has_writes: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One sampled completion, with the exact ids that the sampler received and returned."""

    prompt_ids: Sequence[int]  # `TokenIds` in a conversation, so that the prompts share memory
    completion_ids: list[int]  # including the stop token
    logprobs: list[float]  # one per completion token
    stop_reason: StopReason
    policy_version: int  # number of training steps that made the sampling weights; 0: initial weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A finished trial with a reward."""

    task_id: str
    turns: list[Turn]
    reward: float
    stop_reason: StopReason
    trial_name: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # e.g. duration_s, prefix_breaks
    # One per turn if the environment gives rewards per turn. `reward` is their sum, with two exceptions: a
    # reward rule has changed `reward`, or the episode began with an empty answer. Such an answer is no turn,
    # so its reward is only in `reward`.
    turn_rewards: list[float] = field(default_factory=list)
    # The messages, for logs; training uses `turns`.
    conversation: list[Mapping[str, object]] = field(default_factory=list)
    # Structured tool calls: index of a message in `conversation` -> its fields `content`, `tool_calls` or
    # `name`. They are separate because the policy and the judge read the plain `conversation`.
    tool_fields: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    bonus: float = 0.0  # a judge's bonus, added to `reward` in training only; success rates ignore it
    zero_reason: ZeroReason | None = None  # the graded-zero reason; None: the trial has none
    zero_detail: str = ""  # the error that led to `zero_reason`, as one line
    member: int = 0  # the index of the trial in its group
    seed: int = 0  # the seed of the trial's samples


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFailure:
    """A trial with an infrastructure failure, which is counted by `kind`.

    The trial is removed from its group unless `failed_trial_reward` is set.
    """

    task_id: str
    kind: FailureKind
    message: str
    trial_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """All trials of one task in one training step or evaluation."""

    task: Task
    trajectories: list[Trajectory]
    failures: list[TrialFailure] = field(default_factory=list)
    step: int = 0  # the training step for which, or after which, the group was rolled out

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]
