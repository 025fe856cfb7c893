"""Command line of evaluation: `python -m src.evaluate key=value ...`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from src.cli.command_line import help_for, parse_as
from src.cli.config_file import with_config_files
from src.cli.environment_variables import load_environment, with_locations_from_environment
from src.cli.program import run_program
from src.core.log_setup import set_log_levels
from src.core.process import exit_on_signal, exit_process, run_until_signal
from src.evaluate.config import CompareConfig, EvaluateConfig
from src.policy.served_model import fitted_to_server, with_served_model

TITLE = [
    "python -m src.evaluate key=value ...",
    "",
    "Evaluate a model, a checkpoint or an endpoint on a set of tasks, or compare two finished evaluations.",
]


def evaluation_help(words: Sequence[str]) -> str:
    """Return the help of EvaluateConfig and, without `words`, also of CompareConfig."""
    text = help_for(EvaluateConfig, title=TITLE, words=words)
    return text if words else text + "\n" + help_for(CompareConfig, title=[])


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, evaluation_help)


def _run(argv: Sequence[str]) -> int:
    with exit_on_signal():
        argv = with_config_files(argv)
        load_environment(argv)
        if any(argument.startswith("results=") for argument in argv):
            config = parse_as(CompareConfig, argv)
        else:
            argv = with_served_model(with_locations_from_environment(argv))
            config = parse_as(EvaluateConfig, argv)
            config = fitted_to_server(config, argv, config.lengths_to_fit)
        # These imports take seconds. They are deferred so that --help and option errors appear at once.
        from src.cli.console import Display, terminal
        from src.evaluate.run import compare_finished, run

        set_log_levels()
        display = Display(terminal())
        is_comparison = isinstance(config, CompareConfig)
        work = compare_finished(config, display) if is_comparison else run(config, display)
        return asyncio.run(run_until_signal(work, display.say))


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
