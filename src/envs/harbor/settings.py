"""The options of a run that concern Harbor trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from src.core.length_limits import LengthLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborSettings:
    """The options of the same names in `TrainerConfig`, and the label of the run."""

    model_name: str
    environment_type: str  # auto, docker, sandbox or the name of one of Harbor's environments
    environment_kwargs: Mapping[str, str]
    max_turns: int | None
    length_limits: LengthLimits
    max_length_stops: int
    enable_summarize: bool
    train_subagents: Literal["none", "all"]
    proactive_summarization_threshold: int
    n_parallel_envs: int
    jobs_quota_gb: float
    run_label: str  # identifies everything that the run leaves outside its own folder
