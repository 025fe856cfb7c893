"""Options of the files and logs that a run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import chz

from src.core.options import Options, require


@chz.chz
class LogsOptions(Options):
    """Run directory"""

    logs_dir: str = chz.field(default="/tmp/terminus2-training", doc="Parent directory of runs")


@chz.chz
class RunDirectoryOptions(LogsOptions):
    """Run directory"""

    log_path: str | None = chz.field(default=None, doc="This run's directory; None: logs_dir/<run name>")
    behavior_if_log_dir_exists: Literal["ask", "delete", "resume", "raise"] = chz.field(
        default="raise",
        doc="What to do if the run's directory has a run; resume: continue from its last checkpoint",
    )


@chz.chz
class DumpOptions(RunDirectoryOptions):
    """Run directory"""

    export_path: str | None = chz.field(
        default=None,
        doc="Directory of the dumped evaluations and training examples; None: the run's directory",
    )
    dump_eval_results: bool = chz.field(
        default=True, doc="Dump every evaluation, and examples of training steps 1, 11, 21, ..."
    )
    upload_url: str | None = chz.field(
        default=None,
        doc="Upload every dump below this fsspec URL, e.g. s3://bucket/evals: evaluations to "
        "<run>/global_step_<N>/ and training examples to <run>/training_examples/; None: no upload",
    )

    @chz.validate
    def _dump_options_agree(self) -> None:
        require(
            self.dump_eval_results or self.export_path is None,
            "export_path needs dump_eval_results=true; remove one of them",
        )
        if self.upload_url is not None:
            require(
                "://" in self.upload_url,
                f"upload_url={self.upload_url} is not a URL; write s3://bucket/directory",
            )
            require(self.dump_eval_results, "upload_url needs dump_eval_results=true; remove one of them")

    def dump_directory(self, log_path: Path) -> Path | None:
        """Return the directory of the dumps of the run in `log_path`. None: nothing is dumped."""
        if not self.dump_eval_results:
            return None
        return Path(self.export_path).expanduser() if self.export_path else log_path


@chz.chz
class TrackingOptions(Options):
    """Experiment tracking"""

    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None: no wandb")
    wandb_name: str | None = chz.field(
        default=None,
        doc="Name of the run; None: a name made from options and the date, e.g. "
        "<tasks>-<model>-rank<r>-lr<lr>-g<group>-b<batch>-<date>",
    )
    trackio_project: str | None = chz.field(
        default=None,
        doc="trackio project, whose data stays on this machine (install trackio with scripts/setup.sh "
        "trackio); None: no trackio",
    )
