"""`python -m src.envs.validate tasks_dir=DIR`: check Harbor tasks, and record the grading method of each
task.

Each task is run without a model: its own solution must get the reward 1, and an agent that does nothing
must get the reward 0. A task is sound if it passes both checks, and unsound if it fails one. An unsound task
gives no training signal or a wrong one. A task that has no solution and passes the other check is counted
separately. The command prints one line per task. The exit status is 1 if a task is unsound or `grading.json`
cannot be written. It is 2 for wrong options, if a task directory is invalid, or if there are no task
directories.

The solution is graded in a fresh environment and in place (in the environment where it ran). If both rewards
agree, or if grading in place gives no reward, the trainer grades the task in a fresh environment. Otherwise
the trainer grades the task in place, and keeps the agent's processes only if the reward depends on them.
A task with a separate verifier environment is always graded in that environment.
`grading.json` in tasks_dir records the grading method of each task whose checks both gave a reward.
`environment_kwargs=grading=fresh` or `grading=in_place` tests and records one method only.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import chz

from src.cli.command_line import help_for, parse_as
from src.cli.program import run_program
from src.core.options import at_least, pairs
from src.envs.harbor.environment import check_directories, import_harbor, new_run_label, prepare_machine
from src.envs.harbor.grading_method import write_records


@chz.chz
class ValidateConfig:
    tasks_dir: str = chz.field(doc="Directory of Harbor task directories")
    environment_type: str = chz.field(
        default="auto", doc="auto, docker, sandbox, or another environment type of Harbor"
    )
    environment_kwargs: list[str] | None = chz.field(
        default=None, doc="Settings of the environment as key=value,..."
    )
    n_parallel_envs: int = chz.field(
        default=4, doc="Number of trials that run at the same time", validator=at_least(1)
    )
    logs_dir: str | None = chz.field(
        default=None, doc="Directory for the files of the trials; None: do not keep them"
    )

    @chz.validate
    def _environment_kwargs_are_pairs(self) -> None:
        pairs(self.environment_kwargs, option="environment_kwargs")


def run(config: ValidateConfig) -> int:
    """Validate all tasks, print the report and return the exit status."""
    import_harbor()
    from src.envs.harbor.validation import validate

    directory, run_label = Path(config.tasks_dir).expanduser(), new_run_label()
    checked = check_directories(
        [directory],
        environment_type=config.environment_type,
        environment_kwargs=pairs(config.environment_kwargs, option="environment_kwargs"),
        run_label=run_label,
    )
    kind = checked.environment_type
    for note in checked.notes:
        print(note, file=sys.stderr)
    prepare_machine(kind, run_label=run_label, n_parallel=config.n_parallel_envs)
    with tempfile.TemporaryDirectory() as scratch:
        results = asyncio.run(
            validate(
                checked.tasks[directory],
                checked.configs,
                environment=checked.environment,
                n_parallel=config.n_parallel_envs,
                directory=Path(config.logs_dir or scratch).expanduser(),
                method=checked.grading,
                report=lambda result: print(result.line(logs_dir=config.logs_dir), flush=True),
            )
        )
    methods = {result.task: result.grading for result in results if result.has_rewards}
    num_sound = sum(result.is_sound for result in results)
    num_unsound = sum(result.is_unsound for result in results)
    num_unknown = len(results) - num_sound - num_unsound
    unknown = f", {num_unknown} without solution" if num_unknown else ""
    try:
        print(f"grading methods recorded in {write_records(directory, kind, methods)}")
    finally:  # also if the directory is read-only
        print(f"tasks in {kind}: {num_sound} sound, {num_unsound} unsound{unknown}")
    return 1 if num_unsound else 0


def main(argv: Sequence[str]) -> int:
    title = ["python -m src.envs.validate key=value ..."]
    return run_program(
        argv,
        lambda arguments: run(parse_as(ValidateConfig, arguments)),
        lambda words: help_for(ValidateConfig, title=title, words=words),
        label="validate",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
