"""Tests that Harbor's viewer can read a directory of trials as a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from harbor.viewer.scanner import JobScanner

from src.core.errors import BackendError
from src.envs.harbor.environment import HarborTasks
from tests.fakes.harbor_trials import HELLO, SOLUTION, harbor_tasks, in_sandbox
from tests.fakes.scripted_policy import ScriptedPolicy, solving
from tests.fakes.tokenizer import byte_chat

pytestmark = in_sandbox


@pytest.fixture
def tasks() -> HarborTasks:
    return harbor_tasks()


def test_a_directory_without_trials_stays_empty(tmp_path: Path, tasks: HarborTasks) -> None:
    tasks.batch_ended(tmp_path)
    assert not any(tmp_path.iterdir())


async def test_harbors_viewer_shows_the_totals_of_a_directory(tmp_path: Path, tasks: HarborTasks) -> None:
    directory = tmp_path / "step_000001"
    for script in (SOLUTION, solving("true"), [BackendError("sampling: gone")]):
        policy = ScriptedPolicy(byte_chat(), {"": script})
        await tasks.trial(tasks.train[0], directory=directory, seed=1, temperature=1.0).run(policy)
    (directory / "killed").mkdir()
    tasks.batch_ended(directory)
    viewer = JobScanner(tmp_path)
    config, result = viewer.get_job_config(directory.name), viewer.get_job_result(directory.name)
    assert config is not None and result is not None
    assert config.job_name == directory.name and [task.path for task in config.tasks] == [HELLO]
    counts = (result.n_total_trials, result.stats.n_completed_trials, result.stats.n_errored_trials)
    assert counts == (3, 3, 1)
    assert [agent.name for agent in config.agents] == ["terminus-2"]
    [stats] = result.stats.evals.values()
    assert stats.metrics == [{"mean": 0.5}]
    assert {reward: len(names) for reward, names in stats.reward_stats["reward"].items()} == {1.0: 1, 0.0: 1}
    assert list(stats.exception_stats) == ["BackendError"]
    assert len(viewer.list_trials(directory.name)) == 3
