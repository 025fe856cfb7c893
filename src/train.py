"""The trainer as a command, `python -m src.train key=value ...`, and as the function `train`.

Exit status of the command: 0 (finished), 1 (failed), 2 (invalid option, file or task), 130 (interrupted).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from src.cli.command_line import help_text, parse
from src.cli.config_file import with_config_files
from src.cli.environment_variables import (
    load_environment,
    with_judge_from_environment,
    with_locations_from_environment,
)
from src.cli.program import run_program
from src.config import TrainerConfig
from src.core.log_setup import set_log_levels
from src.core.process import STOPPING, exit_on_signal, exit_process, run_until_signal
from src.policy.served_model import fitted_to_server, with_served_model

if TYPE_CHECKING:
    from src.evaluate.training_events import TrainingEvents
    from src.loop.run_result import RunResult

__all__ = ["TrainerConfig", "main", "read_result", "train"]


async def train(config: TrainerConfig, *, events: TrainingEvents | None = None) -> RunResult:
    """Run the training to its end and return its result.

    `events` receives the progress; None: it is shown in the terminal. Like the command, the function reads
    `.env` and, with backend=skyrl-tx, `.env.skyrl-tx`, and sets unset environment variables of libraries.
    Cancel the call to save a checkpoint and stop the run. Raises TrainerError for every error that the user
    can fix.
    """
    load_environment([f"backend={config.backend}"])
    # These imports take seconds. They come late so that --help and errors in options appear at once.
    from src.cli.console import Display, terminal
    from src.loop.run import run

    set_log_levels()
    return await run(config, Display(terminal()) if events is None else events)


def read_result(directory: str | Path) -> RunResult:
    """Return the result so far of the run in `directory`. The run may be running, interrupted or failed.

    Raises ConfigError if the directory has no run or a damaged file.
    """
    from src.loop import run_result

    return run_result.read_result(directory)


def main(argv: Sequence[str]) -> int:
    """Run the trainer and return its exit status. TRAINER_DEBUG=1 shows the tracebacks of errors."""
    return run_program(argv, _run, help_text)


def _run(argv: Sequence[str]) -> int:
    with exit_on_signal():
        argv = with_config_files(argv)
        load_environment(argv)
        argv = with_served_model(with_locations_from_environment(argv))
        config = parse(argv := with_judge_from_environment(argv))
        config = fitted_to_server(config, argv, config.lengths_to_fit)
        from src.cli.console import Display, terminal

        display = Display(terminal())
        return asyncio.run(
            run_until_signal(
                train(config, events=display),
                display.say,
                announcement=STOPPING,
                stop_timeout_s=config.stop_timeout_s,
            )
        )


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
