"""A folder of trials as a Harbor job: the config.json and result.json from which `harbor view` takes its totals."""

from __future__ import annotations

import uuid
from pathlib import Path

from harbor.models.job.config import JobConfig
from harbor.models.job.result import JobResult, JobStats
from harbor.models.trial.result import TrialResult
from pydantic import ValidationError

from src.records.atomic_io import replace_text


def write_job(directory: Path, *, n_parallel_envs: int) -> None:
    """Sums up the trials that ended below `directory`. Without one there is nothing to show, and nothing is written."""
    results = [
        result for folder in sorted(directory.glob("*")) if (result := trial_result(folder)) is not None
    ]
    if not results:
        return
    first = results[0].config
    config = JobConfig(
        job_name=directory.name,
        jobs_dir=directory.parent,
        n_concurrent_trials=n_parallel_envs,
        # A trial's own session is of no meaning to the job.
        agents=[
            first.agent.model_copy(
                update={"kwargs": {k: v for k, v in first.agent.kwargs.items() if k != "llm_kwargs"}}
            )
        ],
        environment=first.environment,
        verifier=first.verifier,
        tasks=list({result.config.task.path: result.config.task for result in results}.values()),
    )
    started = [result.started_at for result in results if result.started_at is not None]
    finished = [result.finished_at for result in results if result.finished_at is not None]
    result = JobResult(
        id=uuid.uuid5(uuid.NAMESPACE_URL, directory.resolve().as_uri()),
        started_at=min(started),
        updated_at=max(finished),
        finished_at=max(finished),
        n_total_trials=len(results),
        stats=JobStats.from_trial_results(results, n_total_trials=len(results)),
    )
    replace_text(directory / "config.json", config.model_dump_json(indent=2) + "\n")
    replace_text(
        directory / "result.json", result.model_dump_json(indent=2, exclude={"trial_results"}) + "\n"
    )


def trial_result(folder: Path) -> TrialResult | None:
    """None for a trial that did not end: cancelled, or killed with its trainer."""
    try:
        result = TrialResult.model_validate_json((folder / "result.json").read_text())
    except (OSError, ValidationError):
        return None
    return result if result.started_at is not None and result.finished_at is not None else None
