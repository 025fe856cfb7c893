"""Options of `python -m src.evaluate`. The options of trials are those of the trainer."""

from __future__ import annotations

from pathlib import Path

import chz

from src.core.options import Options, at_least, is_http_address, require, share, share_or_0
from src.envs.options import EnvironmentOptions, HarborOptions, TauBenchOptions, environment_options
from src.records.options import LogsOptions
from src.rollouts.options import RolloutOptions

RESULTS_FILE = "results.json"


def is_finished(path: Path) -> bool:
    """Return whether `path` is the directory of a finished evaluation or a file, such as its results.json."""
    return (path / RESULTS_FILE).is_file() or path.is_file()


@chz.chz
class EvaluateConfig(LogsOptions, RolloutOptions, HarborOptions, TauBenchOptions):
    """What is evaluated"""

    model_name: str = chz.field(doc="Model as the server or the endpoint names it")
    tasks: list[str] | None = chz.field(
        default=None,
        doc="Ids or globs of the tasks to evaluate; None: all tasks or, with held_out_of, all held-out tasks",
    )
    train_data: str | None = chz.field(
        default=None,
        doc="Training tasks, which must not be evaluated: a run directory or a directory of Harbor tasks; "
        "None: the value of the option checkpoint, if it is a run directory",
    )
    checkpoint: str | None = chz.field(
        default=None,
        doc="tinker:// path of a sampler checkpoint, or a run directory (its last checkpoint); None: base "
        "model",
    )
    held_out_of: str | None = chz.field(
        default=None,
        doc="Run directory whose held-out tasks are evaluated; agent-trainer evaluate RUN sets it",
    )
    base_url: str | None = chz.field(
        default=None,
        doc="OpenAI-compatible endpoint to evaluate, e.g. http://127.0.0.1:8000/v1; key: OPENAI_API_KEY",
    )
    compare_with: str | None = chz.field(
        default=None,
        doc="Compare task by task with the directory of another evaluation, a checkpoint, or base (base "
        "model); the difference is this evaluation minus the other one",
    )
    n_samples: int = chz.field(default=4, doc="Trials per task", validator=at_least(1))
    top_p: float = chz.field(
        default=1.0,
        doc="Sample from the most likely tokens that together have this probability; 1: from all",
        validator=share,
    )
    enable_thinking: bool = chz.field(
        default=False,
        doc="Let the model think before each answer, if its chat template has the variable enable_thinking",
    )
    log_path: str | None = chz.field(
        default=None,
        doc="This evaluation's directory; None: logs_dir/eval-<tasks>-<model>-<date>, or with agent-trainer "
        "evaluate RUN: RUN/evaluations/<date>",
    )
    max_failure_rate: float = chz.field(
        default=0.5,
        doc="Fail after writing the results if more than this share of the trials is ungraded",
        validator=share_or_0,
    )

    @property
    def uses_backend(self) -> bool:
        return self.base_url is None

    @property
    def environment(self) -> EnvironmentOptions:
        """The options of the environment, with eval_split=0.

        If `held_out_of` is set, `environment_of` (src/evaluate/run.py) replaces the options of the split by
        those of the run that `held_out_of` names.
        """
        return environment_options(self, url=self.base_url)

    @chz.validate
    def _one_policy_is_evaluated(self) -> None:
        if self.base_url is None:
            return
        require(
            self.checkpoint is None,
            "base_url and checkpoint exclude each other; for a checkpoint of skyrl-tx use skyrl_tx_url",
        )
        require(
            self.compare_with is None or is_finished(Path(self.compare_with).expanduser()),
            f"compare_with={self.compare_with} is not the directory of a finished evaluation; with base_url, "
            "only finished evaluations can be compared; give such a directory",
        )
        require(
            is_http_address(self.base_url),
            f"base_url={self.base_url} is not an HTTP address; write base_url=http://host:port/v1",
        )
        require(
            not self.use_native_tool_calling,
            "use_native_tool_calling needs the model's own chat template, which base_url does not give; "
            "remove use_native_tool_calling or base_url",
        )
        require(
            not self.enable_thinking,
            "enable_thinking needs the model's own chat template, which base_url does not give; "
            "remove enable_thinking or base_url",
        )


@chz.chz
class CompareConfig(Options):
    """Comparison of two finished evaluations"""

    results: str = chz.field(doc="Directory of a finished evaluation; no trials are run")
    compare_with: str = chz.field(
        doc="Directory of the evaluation that is compared with results, task by task; the difference is "
        "results minus compare_with"
    )
