"""Options of the schedule of a run, of its rollouts and of the judge."""

from __future__ import annotations

from typing import Literal

import chz

from src.core.options import Options, SeedOptions, at_least, finite, pairs, require, share_or_0
from src.envs.options import AgentOptions, TrialOptions
from src.learning.options import CurriculumOptions, DynamicSamplingOptions, FilterOptions, StalenessOptions
from src.policy.options import JudgeEndpointOptions


@chz.chz
class BatchOptions(Options):
    """Batches and schedule"""

    batch_size: int = chz.field(default=1, doc="Tasks (groups) per step", validator=at_least(1))
    group_size: int = chz.field(default=8, doc="Trials per task", validator=at_least(1))


@chz.chz
class ScheduleOptions(BatchOptions, SeedOptions):
    """Batches and schedule"""

    n_epochs: int = chz.field(default=1, doc="Passes over the training tasks", validator=at_least(1))
    max_steps: int | None = chz.field(
        default=None, doc="Stop after this many steps; None: all epochs", validator=at_least(1)
    )
    domain_mixture: list[str] | None = chz.field(
        default=None,
        doc="Shares of the domains in every batch, e.g. retail=0.7,airline=0.3; None: every task once per "
        "epoch",
    )

    @property
    def domain_shares(self) -> dict[str, float]:
        """The share of each domain in a batch; the shares add up to 1. Empty without a mixture.

        >>> ScheduleOptions(domain_mixture=["retail=3", "airline=1"]).domain_shares
        {'retail': 0.75, 'airline': 0.25}
        """
        weights: dict[str, float] = {}
        for domain, text in pairs(self.domain_mixture, option="domain_mixture").items():
            try:
                weights[domain] = float(text)
            except ValueError:
                weights[domain] = 0.0
            require(
                0 < weights[domain] < float("inf"),
                f"domain_mixture {domain} needs a number above 0, not {text!r}",
            )
        return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}

    @chz.validate
    def _mixture_has_shares(self) -> None:
        assert self.domain_shares is not None


@chz.chz
class PipelineOptions(BatchOptions, StalenessOptions):
    """Rollouts ahead of training"""

    max_groups_in_flight: int | None = chz.field(
        default=None, doc="Maximum number of concurrent groups if max_staleness > 0; None: 2 * batch_size"
    )
    stream_groups: bool = chz.field(
        default=False,
        doc="Send the datums of each finished group to forward_backward as soon as the step takes the group "
        "from the pipeline, while other groups are still rolled out; every group has the same weight in the "
        "loss",
    )

    @property
    def uses_pipeline(self) -> bool:
        """Whether a step takes its groups from the pipeline, in the order in which they end."""
        return self.max_staleness > 0 or self.stream_groups

    @chz.validate
    def _groups_in_flight_fill_a_batch(self) -> None:
        in_flight = self.max_groups_in_flight
        require(
            in_flight is None or self.max_staleness > 0,
            "max_groups_in_flight needs max_staleness=1 or more; add it, or remove max_groups_in_flight",
        )
        require(
            in_flight is None or in_flight >= self.batch_size,
            f"max_groups_in_flight={in_flight} is below batch_size={self.batch_size}; set "
            f"max_groups_in_flight={self.batch_size} or more",
        )


@chz.chz
class RolloutOptions(TrialOptions, SeedOptions):
    """Trials"""

    trial_attempts: int = chz.field(
        default=3,
        doc="Maximum number of attempts of a trial; an attempt is repeated after a failure of the kind "
        "sandbox, backend, verifier or env_server",
        validator=at_least(1),
    )
    retry_wait_s: float = chz.field(
        default=1.0,
        doc="Wait before the second attempt; each further wait is twice as long as the previous one, up to "
        "60 s; a random 0 to 50 % is added to each wait",
        validator=at_least(0),
    )


@chz.chz
class FaultOptions(Options):
    """Failures and timeouts"""

    quarantine_after: int = chz.field(
        default=2,
        doc="Quarantine a task after this many consecutive groups without a graded trial; a group whose "
        "failures are all of the kind agent resets the count; 0: never",
        validator=at_least(0),
    )
    max_failure_rate: float = chz.field(
        default=0.5,
        doc="Stop if more than this share of the latest trials could not be graded; 1: no limit",
        validator=share_or_0,
    )


@chz.chz
class JudgeOptions(JudgeEndpointOptions):
    """Judge"""

    taxonomy_feedback: bool = chz.field(
        default=False,
        doc="Add a bonus to training rewards; the bonus decreases with the number of MAST's 14 failure modes "
        "that occur in the trial; the environment variable TAXONOMY_FEEDBACK=true also enables it",
    )
    taxonomy_alpha: float = chz.field(
        default=1.0,
        doc="The bonus of a trial without failures; the environment variable TAXONOMY_ALPHA overrides it",
        validator=[at_least(0), finite],
    )
    taxonomy_formula: Literal["one_plus_failures", "inverse_failures"] = chz.field(
        default="one_plus_failures",
        doc="one_plus_failures: alpha / (1 + failures); inverse_failures: alpha / max(1, failures)",
    )
    judge_prompt_price: float = chz.field(
        default=0.0,
        doc="Price of the judge's input in USD per million tokens, for the metric judge/cost_usd",
        validator=[at_least(0), finite],
    )
    judge_completion_price: float = chz.field(
        default=0.0,
        doc="Price of the judge's output in USD per million tokens",
        validator=[at_least(0), finite],
    )

    @chz.validate
    def _feedback_needs_a_judge(self) -> None:
        require(
            not self.taxonomy_feedback or self.judge_model is not None,
            "taxonomy_feedback needs a judge: set judge_model=NAME and judge_base_url=http://host:port/v1",
        )


@chz.chz
class GroupOptions(
    PipelineOptions, FilterOptions, CurriculumOptions, DynamicSamplingOptions, FaultOptions, AgentOptions
):
    """Collection of batches"""
