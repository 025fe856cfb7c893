"""Options of `python -m src.evaluate`. Options of trials have the trainer's defaults and validation."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import chz

from src.config import TrainerConfig

_DEFAULTS = inspect.signature(TrainerConfig).parameters


def trainer_option(name: str, *, doc: str = "") -> Any:
    """Declare an option with the trainer's default and, unless `doc` is given, the trainer's help text."""
    return chz.field(default=_DEFAULTS[name].default, doc=doc or chz.chz_fields(TrainerConfig)[name]._doc)


@chz.chz
class EvaluateConfig:
    """What is evaluated"""

    model_name: str | None = chz.field(
        default=None, doc="Model as the server or the endpoint names it; not needed with results="
    )
    env: str = trainer_option("env")
    tasks_dir: str | None = trainer_option(
        "tasks_dir", doc="Folder of Harbor task folders; not needed with results="
    )
    data: list[str] | None = trainer_option(
        "data", doc="Questions with answers: .jsonl or .parquet files; selects env=data and needs reward"
    )
    reward: str | None = trainer_option("reward")
    test_data: list[str] | None = trainer_option(
        "test_data", doc="Tasks to evaluate on: files of rows, DOMAIN:SPLIT, or NAME=..."
    )
    tasks: list[str] | None = chz.field(
        default=None, doc="Only these tasks: ids or globs; None: all, held-out ones included"
    )
    train_data: str | None = chz.field(
        default=None,
        doc="Run folder or folder of tasks that must not be evaluated; None: the run folder in checkpoint",
    )
    checkpoint: str | None = chz.field(
        default=None,
        doc="tinker:// path of a sampler checkpoint, or a run folder (its last checkpoint); None: base model",
    )
    base_url: str | None = chz.field(
        default=None,
        doc="OpenAI-compatible endpoint to evaluate, e.g. http://127.0.0.1:8000/v1; key: OPENAI_API_KEY",
    )
    compare_with: str | None = chz.field(
        default=None,
        doc="Compare task by task with the folder of another evaluation, a checkpoint (as above), or base",
    )
    results: str | None = chz.field(
        default=None, doc="Folder of a finished evaluation to compare; no trials are played"
    )

    n_samples: int = chz.field(default=4, doc="Trials per task")
    temperature: float = trainer_option("temperature", doc="Sampling temperature")
    seed: int = trainer_option("seed", doc="Seed of every sample")

    backend: Literal["tinker", "skyrl-tx"] = trainer_option("backend")
    skyrl_tx_url: str | None = trainer_option("skyrl_tx_url")
    tinker_base_url: str | None = trainer_option("tinker_base_url")
    tokenizer: str | None = trainer_option("tokenizer")
    logs_dir: str = trainer_option("logs_dir")
    log_path: str | None = chz.field(
        default=None, doc="This evaluation's folder; None: logs_dir/eval-<tasks>-<model>-<date>"
    )

    max_turns: int | None = trainer_option("max_turns")
    max_tokens: int = trainer_option("max_tokens")
    context_limit: int = trainer_option("context_limit")
    max_input_length: int | None = trainer_option("max_input_length")
    max_consecutive_truncations: int = trainer_option("max_consecutive_truncations")
    enable_summarize: bool = trainer_option("enable_summarize")
    proactive_summarization_threshold: int = trainer_option("proactive_summarization_threshold")
    environment_type: Literal["auto", "docker", "sandbox", "daytona", "modal", "e2b", "runloop"] = (
        trainer_option("environment_type")
    )
    environment_kwargs: list[str] | None = trainer_option("environment_kwargs")
    use_native_tool_calling: bool = trainer_option("use_native_tool_calling")
    tau2_home: str | None = trainer_option("tau2_home")
    judge_model: str | None = trainer_option("judge_model")
    judge_base_url: str | None = trainer_option("judge_base_url")
    n_parallel_envs: int = trainer_option("n_parallel_envs")
    trial_timeout_s: float | None = trainer_option("trial_timeout_s")
    trial_attempts: int = trainer_option("trial_attempts")
    retry_wait_s: float = trainer_option("retry_wait_s")
    heartbeat_timeout_s: float = trainer_option("heartbeat_timeout_s")
    request_timeout_s: float = trainer_option("request_timeout_s", doc="Timeout of one request to the server")
    max_failure_rate: float = chz.field(
        default=0.5, doc="Fail after writing the results if more than this share of the trials is ungraded"
    )

    @property
    def trials(self) -> TrainerConfig:
        """The trainer's configuration of these trials. Raises ValueError if the trainer would reject it."""
        assert self.model_name is not None
        shared = {
            name: getattr(self, name)
            for name in chz.chz_fields(EvaluateConfig)
            if name in _DEFAULTS and name not in ("log_path", "train_data")
        }
        if self.base_url is not None:  # the context limit of such a server is unknown
            shared |= {"backend": "skyrl-tx", "skyrl_tx_url": self.base_url}
        return TrainerConfig(**shared, eval_split=0.0)

    @chz.validate
    def _something_is_evaluated(self) -> None:
        if self.results is not None:
            if self.compare_with is None:
                raise ValueError(
                    "results= names a finished evaluation; add compare_with=<folder of another evaluation>"
                )
            return
        if self.model_name is None:
            raise ValueError("missing: model_name; e.g. model_name=..., or --help")
        if self.base_url is not None and self.checkpoint is not None:
            raise ValueError(
                "base_url and checkpoint exclude each other; for a checkpoint of our server use skyrl_tx_url"
            )
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url={self.base_url} is not an HTTP address; write base_url=http://host:port/v1"
            )
        if self.base_url is not None and self.use_native_tool_calling:
            raise ValueError(
                "use_native_tool_calling needs the model's own chat template, which base_url does not give; "
                "remove one of them"
            )
        if self.n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, not {self.n_samples}")
        assert self.trials
