"""Command line of the analysis: `python -m src.analyze runs=RUN,OTHER_RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from src.analyze.comparison import overview, pair
from src.analyze.config import AnalyzeConfig
from src.analyze.conversations import conversations
from src.analyze.markdown import put_section
from src.analyze.report import run_section
from src.analyze.run_files import AnalyzedRun, read_run
from src.cli.command_line import help_for, parse_as
from src.cli.program import run_program
from src.core.errors import ConfigError
from src.core.printable import printable

TITLE = [
    "python -m src.analyze runs=RUN,OTHER_RUN",
    "",
    "Write the analysis of one run, or of several runs and their comparison, to a Markdown file. With task=,",
    "print the conversations of the matching held-out tasks instead.",
]


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, lambda words: help_for(AnalyzeConfig, title=TITLE, words=words))


def _run(argv: Sequence[str]) -> int:
    analyze(parse_as(AnalyzeConfig, argv))
    return 0


def analyze(config: AnalyzeConfig) -> None:
    """Write one section per run, and a section that compares them if there are several.

    With `task`, print the conversations of the matching tasks instead.
    """
    runs = read_runs(config)
    if config.task is not None:
        print(printable("\n".join(line for run in runs for line in conversations(run, config.task))))
        return
    path = Path(config.write_to).expanduser()
    for run in runs:
        put_section(path, run.name, run_section(run))
    if len(runs) > 1:
        names = [run.name for run in runs]
        lines = [f"## {', '.join(names)}", "", *overview(runs)]
        for run in runs[1:]:
            lines += ["", *pair(runs[0], run)]
        put_section(path, " | ".join(names), lines)
    print(f"wrote {path}")


def read_runs(config: AnalyzeConfig) -> list[AnalyzedRun]:
    """Read the runs. Raises ConfigError if two runs share a name, because the name identifies a section."""
    runs: dict[str, AnalyzedRun] = {}
    for directory in config.runs:
        run = read_run(directory, first_step=config.first_step, last_step=config.last_step)
        if run.name in runs:
            raise ConfigError(f"two runs are called {run.name}; rename one of their directories")
        runs[run.name] = run
    return list(runs.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
