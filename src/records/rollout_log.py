"""Compact records of trials: one JSON line per trial in rollouts/<purpose>_<step>.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from src.core.trajectory import Trajectory, TrajectoryGroup, TrialFailure
from src.records.atomic_io import readable, replace_text
from src.records.tracking import finite


def record_groups(
    path: Path, groups: Sequence[TrajectoryGroup], advantages: Mapping[tuple[str, str], float]
) -> None:
    """Write one line per trial of the groups, graded trials first.

    `advantages` has the advantages of the trained trials, by (task id, trial name).
    """
    records = [
        trajectory_record(trajectory, advantages.get((trajectory.task_id, trajectory.trial_name)))
        for group in groups
        for trajectory in group.trajectories
    ]
    records += [failure_record(failure) for group in groups for failure in group.failures]
    replace_text(path, "".join(json.dumps(readable(record)) + "\n" for record in records))


def trajectory_record(trajectory: Trajectory, advantage: float | None) -> dict[str, object]:
    """Return the line of a graded trial. `advantage` is None if the trial was not trained."""
    return {
        "task": trajectory.task_id,
        "trial": trajectory.trial_name,
        "reward": trajectory.reward,
        **({"bonus": trajectory.bonus} if trajectory.bonus else {}),
        "stop_reason": trajectory.stop_reason,
        **({"zero_reason": trajectory.zero_reason} if trajectory.zero_reason else {}),
        **({"zero_detail": trajectory.zero_detail} if trajectory.zero_detail else {}),
        "advantage": advantage,
        "turns": len(trajectory.turns),
        "tokens": sum(len(turn.completion_ids) for turn in trajectory.turns),
        "metrics": finite(trajectory.metrics),
    }


def failure_record(failure: TrialFailure) -> dict[str, object]:
    return {
        "task": failure.task_id,
        "trial": failure.trial_name,
        "failure": failure.kind,
        "message": failure.message,
    }
