"""The files config.json and result.json, with which `harbor view` shows a directory of trials as a job."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from harbor.models.job.config import JobConfig
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trial.result import TrialResult
from pydantic import ValidationError

from src.core.errors import VerifierError
from src.envs.harbor.verifier_reward import verifier_reward
from src.records.atomic_io import replace_text


def write_job(directory: Path, *, n_parallel_envs: int) -> None:
    """Write config.json and result.json for the trials in `directory` that have ended, if there are any."""
    results = [result for trial_dir in sorted(directory.glob("*")) if (result := trial_result(trial_dir))]
    if not results:
        return
    first = results[0].config
    config = JobConfig(
        job_name=directory.name,
        jobs_dir=directory.parent,
        n_concurrent_trials=n_parallel_envs,
        agents=[
            first.agent.model_copy(
                update={
                    "name": results[0].agent_info.name,  # for the column of agents
                    # `llm_kwargs` is left out, because it names the session of one trial.
                    "kwargs": {k: v for k, v in first.agent.kwargs.items() if k != "llm_kwargs"},
                }
            )
        ],
        environment=first.environment,
        verifier=first.verifier,
        tasks=list({result.config.task.path: result.config.task for result in results}.values()),
    )
    stats = JobStats.from_trial_results(results, n_total_trials=len(results))
    rewards = list(_rewards(results))
    for evaluation in stats.evals.values():  # one, because all trials have the same agent and model
        evaluation.metrics = [{"mean": fmean(rewards)}] if rewards else []
    started = [result.started_at for result in results if result.started_at is not None]
    finished = [result.finished_at for result in results if result.finished_at is not None]
    result = JobResult(
        id=uuid.uuid5(uuid.NAMESPACE_URL, directory.resolve().as_uri()),
        started_at=min(started),
        updated_at=max(finished),
        finished_at=max(finished),
        n_total_trials=len(results),
        stats=stats,
    )
    replace_text(directory / "config.json", config.model_dump_json(indent=2) + "\n")
    replace_text(
        directory / "result.json", result.model_dump_json(indent=2, exclude={"trial_results"}) + "\n"
    )


def trial_result(directory: Path) -> TrialResult | None:
    """Return the result of a trial, or None if the trial has not ended, for example because it was killed."""
    try:
        result = TrialResult.model_validate_json((directory / "result.json").read_text())
    except (OSError, ValidationError):
        return None
    return result if result.started_at is not None and result.finished_at is not None else None


def _rewards(results: Sequence[TrialResult]) -> Iterator[float]:
    """Yield the rewards of the graded trials."""
    for result in results:
        try:
            yield verifier_reward(result.verifier_result.rewards if result.verifier_result else None)
        except VerifierError:
            continue
