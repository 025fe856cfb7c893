"""`FakeTasks`: a task source without sandboxes, whose trials run a function of the test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrialFailure, Turn
from src.policy.sampling_policy import Policy, SampleRequest

RunTrial = Callable[["FakeTrial", Policy], Awaitable[Trajectory | TrialFailure]]


def task(name: str) -> Task:
    return Task(id=name, path=Path("tasks") / name)


def turn(prompt: list[int], completion: list[int], *, logprob: float = -0.5, version: int = 0) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[logprob] * len(completion),
        stop_reason=StopReason.STOP,
        policy_version=version,
    )


def trajectory(
    task_id: str = "a",
    reward: float = 0.0,
    turns: Sequence[Turn] = (),
    *,
    stop: StopReason = StopReason.STOP,
    name: str = "t",
) -> Trajectory:
    return Trajectory(task_id=task_id, turns=list(turns), reward=reward, stop_reason=stop, trial_name=name)


def failure(
    task_id: str = "a", kind: FailureKind = FailureKind.SANDBOX, message: str = "no tmux"
) -> TrialFailure:
    return TrialFailure(task_id=task_id, kind=kind, message=message, trial_name="f")


async def say_a_token(trial: FakeTrial, policy: Policy) -> Trajectory:
    """Take two turns of one token each. The reward is 1 if the last token is 3."""
    prompt = [9, 8]
    first = await policy.sample(
        SampleRequest(prompt_ids=prompt, max_tokens=1, temperature=trial.temperature, seed=trial.seed)
    )
    second_prompt = [*prompt, *first.completion_ids, 7]
    second = await policy.sample(
        SampleRequest(
            prompt_ids=second_prompt, max_tokens=1, temperature=trial.temperature, seed=trial.seed + 1
        )
    )
    return trajectory(
        trial.task.id,
        float(second.completion_ids == [3]),
        [first, second],
        name=f"{trial.task.id}-{trial.seed}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeTrial:
    task: Task
    directory: Path
    seed: int
    temperature: float
    run_trial: RunTrial
    member: int = 0

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        return await self.run_trial(self, policy)


@dataclass(kw_only=True)
class FakeTasks:
    """A task source. `made` contains every trial that `trial` returned, in order."""

    train: Sequence[Task]
    eval: Sequence[Task] = ()
    run_trial: RunTrial = say_a_token
    made: list[FakeTrial] = field(default_factory=list)
    noop_rewards: dict[str, float] = field(default_factory=dict)  # task -> reward of doing nothing
    num_closed: int = 0
    ended: list[str] = field(default_factory=list)  # names of the directories of finished batches

    def trial(
        self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0
    ) -> FakeTrial:
        trial = FakeTrial(
            task=task,
            directory=directory,
            seed=seed,
            temperature=temperature,
            run_trial=self.run_trial,
            member=member,
        )
        self.made.append(trial)
        return trial

    async def close(self) -> None:
        self.num_closed += 1

    async def noop_reward(self, task: Task) -> float | None:
        return self.noop_rewards.get(task.id)

    def batch_ended(self, directory: Path) -> None:
        self.ended.append(directory.name)

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        return " ".join(str(token) for token in token_ids if not (clean and token == 9))
