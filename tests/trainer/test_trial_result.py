"""Tests the description of the exception that Harbor recorded."""

from __future__ import annotations

import pytest
from harbor.models.trial.result import ExceptionInfo, TrialResult

from src.envs.harbor.trial_result import describe_exception


@pytest.mark.parametrize(
    ("message", "description"),
    [
        ("no reward\nat all", "RuntimeError: no reward"),
        ("", "RuntimeError: no message"),
        (
            "Docker compose command failed for environment a. Command: docker compose build. "
            "Return code: 17. Stdout: #0 building\n\n#6 RUN false\n"
            "failed to solve: RUN false: exit code: 1\n. Stderr: None. ",
            "RuntimeError: Docker compose command failed for environment a: "
            "failed to solve: RUN false: exit code: 1",
        ),
    ],
)
def test_an_exception_is_described_by_its_essential_line(message: str, description: str) -> None:
    info = ExceptionInfo.from_exception(RuntimeError(message))
    assert describe_exception(TrialResult.model_construct(exception_info=info)) == description
