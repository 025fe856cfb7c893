"""What grading in a fresh sandbox costs: `python -m scripts.bench.grading datasets/quickstart/train [trials]`.

Plays each of the first tasks with its own solution, in turn in place and in a fresh sandbox, and prints the medians of whole trials.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from src.envs.harbor.environment import import_harbor, new_run_label, trial_environment
from src.envs.harbor.grading_method import GradingMethod, GradingMode

METHODS = (GradingMethod(mode=GradingMode.IN_PLACE), GradingMethod(mode=GradingMode.FRESH))


async def seconds(
    folder: Path, method: GradingMethod, environment: dict[str, object], directory: Path
) -> float:
    from harbor.models.trial.config import (
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
        VerifierConfig,
    )
    from harbor.trial.trial import Trial

    from src.envs.harbor.grading import graded

    config = TrialConfig(
        task=TaskConfig(path=folder),
        trials_dir=directory,
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate(environment),
        verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
    )
    started = time.perf_counter()
    trial = await Trial.create(config)
    async with graded(trial, method):
        result = await trial.run()
    took = time.perf_counter() - started
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}, folder
    return took


async def measure(folders: list[Path], num_trials: int) -> None:
    import_harbor()
    environment = trial_environment("sandbox", {}, run_label=new_run_label(), n_parallel=1)
    times: dict[GradingMode, list[float]] = {method.mode: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(-1, num_trials):
            for method in METHODS:
                took = await seconds(folders[number % len(folders)], method, environment, Path(scratch))
                if number >= 0:  # the first one warms up
                    times[method.mode].append(took)
    for mode, taken in times.items():
        print(
            f"{mode}: median {statistics.median(taken):.3f} s of {len(taken)} trials, {min(taken):.3f} to {max(taken):.3f}"
        )
    print(
        f"cost of a fresh sandbox: {statistics.median(times[GradingMode.FRESH]) - statistics.median(times[GradingMode.IN_PLACE]):+.3f} s a trial"
    )


if __name__ == "__main__":
    found = sorted(path.parent for path in Path(sys.argv[1]).glob("*/task.toml"))
    asyncio.run(measure(found, int(sys.argv[2]) if len(sys.argv) > 2 else 20))
