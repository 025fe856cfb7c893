"""Options of `python -m src.analyze`."""

from __future__ import annotations

import chz

from src.core.options import Options, require


@chz.chz
class AnalyzeConfig(Options):
    """Analysis"""

    runs: list[str] = chz.field(
        doc="Directories of runs (src.train), of evaluations (src.evaluate), or of copies of dumped_evals/ "
        "or of SkyRL's dumps; each further directory is compared with the first directory"
    )
    write_to: str = chz.field(
        default="experiments.md",
        doc="Markdown file to write; existing sections about the same runs are replaced",
    )
    first_step: int | None = chz.field(
        default=None,
        doc="Step of the earlier of the two evaluations that are compared within each run; None: the first "
        "evaluation",
    )
    last_step: int | None = chz.field(
        default=None,
        doc="Step of the later evaluation, which is also analyzed in detail and compared between runs; None: "
        "the last evaluation",
    )
    task: str | None = chz.field(
        default=None,
        doc="Held-out task, an id or a glob: print the conversations of its trials in the later evaluation "
        "(last_step) and write nothing",
    )

    @chz.validate
    def _steps_are_in_order(self) -> None:
        first, last = self.first_step, self.last_step
        require(
            first is None or last is None or first <= last,
            f"first_step={first} is after last_step={last}; exchange them",
        )

    @chz.validate
    def _there_are_runs(self) -> None:
        require(bool(self.runs), "runs= names no directory; write runs=RUN,OTHER_RUN")
        require(len(set(self.runs)) == len(self.runs), "runs= names a directory twice; remove one of them")
