"""Options of task selection, reward rules, advantages, corrections, the loss and the optimizer.

The first line of a class's docstring is the heading of its options in the help. Classes with the same heading
share a section (`src.core.options.sections`).
"""

from __future__ import annotations

from typing import Literal

import chz

from src.core.length_limits import LengthOptions
from src.core.options import Options, SeedOptions, above, at_least, finite, pairs, require
from src.learning.advantages import Estimator, describe_estimators
from src.learning.penalty_options import DistillationOptions, KlOptions

# The thresholds of the losses that clip, as absolute bounds of the ratio.
CLIP_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
CLIPPED_LOSSES = ("ppo", "cispo")
# The losses that every Tinker endpoint has and that the trainer can use. The loss `dro` of the Tinker API is
# left out. The trainer gives tokens that were not sampled, such as prompts, the advantage 0. The gradient of
# the other losses is then 0, but dro has a quadratic term without the advantage, which would train these
# tokens.
LOSSES = ("importance_sampling", *CLIPPED_LOSSES)
SERVER_LOSS = "server:"  # the prefix of a loss that only the user's own server has


@chz.chz
class OptimizerOptions(Options):
    """Optimizer and loss

    The options of the optimizer except the learning rate. RL and supervised fine-tuning share them.
    """

    lr_schedule: Literal["constant", "linear", "cosine"] = chz.field(
        default="constant", doc="Decay of learning_rate to 0 by the end of the run; constant: no decay"
    )
    lr_warmup_steps: int = chz.field(
        default=0,
        doc="Steps over which the learning rate rises from 0 to learning_rate",
        validator=at_least(0),
    )
    adam_beta1: float = chz.field(default=0.9, doc="Decay rate of Adam's first moment")
    adam_beta2: float = chz.field(default=0.95, doc="Decay rate of Adam's second moment")
    adam_eps: float = chz.field(default=1e-8, doc="Adam's epsilon", validator=finite)
    weight_decay: float = chz.field(
        default=0.0, doc="Decoupled weight decay", validator=[at_least(0), finite]
    )
    grad_clip_norm: float = chz.field(
        default=0.0, doc="Clip the global gradient norm to this; 0: off", validator=at_least(0)
    )


@chz.chz
class LearnerOptions(OptimizerOptions):
    """Optimizer and loss

    Adds the learning rate and the loss of RL.
    """

    learning_rate: float = chz.field(default=5e-4, doc="Adam's learning rate", validator=[above(0), finite])
    loss_fn: str = chz.field(
        default="ppo",
        doc="Policy-gradient loss: importance_sampling, ppo, cispo, or server:NAME for a loss that you added "
        "to your server (docs/how-to/add-a-loss.md)",
    )
    loss_fn_config: list[str] | None = chz.field(
        default=None,
        doc="Settings of the loss as key=value,..., e.g. clip_low_threshold=0.8,clip_high_threshold=1.28",
    )

    @property
    def is_server_loss(self) -> bool:
        """Whether the loss is declared only on the server, which checks its settings."""
        return self.loss_fn.startswith(SERVER_LOSS)

    @property
    def loss_name(self) -> str:
        """The name of the loss in the requests."""
        return self.loss_fn.removeprefix(SERVER_LOSS)

    @property
    def loss_settings(self) -> dict[str, float]:
        """The numbers of `loss_fn_config`. Raises ValueError for an invalid name or value."""
        allowed = CLIP_THRESHOLDS if self.loss_fn in CLIPPED_LOSSES else ()
        settings: dict[str, float] = {}
        for key, value in pairs(self.loss_fn_config, option="loss_fn_config").items():
            require(
                self.is_server_loss or key in allowed,
                f"loss_fn={self.loss_fn} has no setting {key!r}; it takes {', '.join(allowed) or 'none'}",
            )
            try:
                settings[key] = float(value)
            except ValueError as error:
                raise ValueError(f"loss_fn_config {key} needs a number, not {value!r}") from error
        if self.is_server_loss:
            return settings
        low, high = (settings.get(name, 1.0) for name in CLIP_THRESHOLDS)
        require(
            0 <= low <= 1 <= high,
            f"loss_fn_config: clip_low_threshold={low:g} must be from 0 to 1 and "
            f"clip_high_threshold={high:g} at least 1, because they bound the ratio; for an epsilon write "
            "1 - eps and 1 + eps",
        )
        return settings

    @chz.validate
    def _loss_exists(self) -> None:
        require(
            self.loss_fn in LOSSES or (self.is_server_loss and bool(self.loss_name)),
            f"loss_fn={self.loss_fn}: expected {' | '.join(LOSSES)} | server:NAME of a loss of your server",
        )
        require(
            self.loss_fn != f"{SERVER_LOSS}dro",
            "loss_fn=server:dro would also train tokens that were never sampled; use another loss",
        )

    @chz.validate
    def _loss_has_its_settings(self) -> None:
        assert self.loss_settings is not None


@chz.chz
class FilterOptions(Options):
    """Reward rules and group filters"""

    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="Leave out groups of two or more trials whose rewards are all equal"
    )
    min_group_size: int = chz.field(
        default=1, doc="Leave out groups with fewer graded trials", validator=at_least(1)
    )
    failed_trial_reward: Literal[0] | None = chz.field(
        default=None,
        doc="None: trials that could not be graded leave the group; 0: they count as reward 0 (SkyRL's "
        "behaviour)",
    )
    apply_overlong_filtering: Literal["off", "stop_reason", "eos"] = chz.field(
        default="off",
        doc="Which trajectories train no token, but keep their reward in the group (DAPO). stop_reason: "
        "those that a limit ended (tokens, context, turns or time) or that failed. eos: those whose last "
        "answer does not end with a stop token",
    )
    zero_reward_on_non_stop: bool = chz.field(
        default=False,
        doc="Before advantages are computed, set the reward to 0 for trajectories that a limit ended",
    )
    zero_reward_on_length_threshold: bool = chz.field(
        default=False,
        doc="Before advantages are computed, set the reward to 0 for trajectories with an answer longer than "
        "max_assistant_response_tokens",
    )
    max_assistant_response_tokens: int = chz.field(
        default=2048,
        doc="Longest answer, in tokens, that zero_reward_on_length_threshold allows",
        validator=at_least(1),
    )


@chz.chz
class StepWiseOptions(Options):
    """Advantages and loss reduction

    Contains the option of this section that environments also read.
    """

    step_wise_trajectories: bool = chz.field(
        default=False, doc="Make each turn a separate training sequence, as SkyRL's option of this name does"
    )


@chz.chz
class AdvantageOptions(StepWiseOptions, LengthOptions):
    """Advantages and loss reduction

    Adds the options that only training reads.
    """

    advantage_estimator: Estimator = chz.field(default="grpo", doc=describe_estimators())
    normalize_advantages_by_std: bool = chz.field(
        default=True,
        doc="Divide centred rewards by their group's standard deviation; false turns grpo into dr_grpo",
    )
    singleton_advantage: Literal["zero", "raw"] = chz.field(
        default="zero",
        doc="Advantage of a group's only graded trial. zero: 0. raw: its reward, as in SkyRL (only with grpo "
        "and dr_grpo)",
    )
    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"] = (
        chz.field(
            default="token_mean",
            doc="token_mean: mean over tokens; sequence_mean: mean of the trajectories' token means; "
            "seq_mean_token_sum_norm: mean of the trajectories' token sums / max_sequence_length; "
            "prompt_mean: mean of the prompts' token means",
        )
    )
    num_substeps: int = chz.field(
        default=1,
        doc="Optimizer steps per batch, each on a different share of the groups, or of the trajectories if "
        "there are fewer groups than steps",
        validator=at_least(1),
    )

    @property
    def estimator(self) -> Estimator:
        """The advantage estimator that `advantage_estimator` and `normalize_advantages_by_std` choose."""
        is_unscaled = self.advantage_estimator == "grpo" and not self.normalize_advantages_by_std
        return "dr_grpo" if is_unscaled else self.advantage_estimator

    @chz.validate
    def _estimator_agrees(self) -> None:
        require(
            self.normalize_advantages_by_std or self.advantage_estimator in ("grpo", "dr_grpo"),
            "normalize_advantages_by_std=false works only with advantage_estimator=grpo or dr_grpo, not "
            f"{self.advantage_estimator}; remove normalize_advantages_by_std",
        )
        require(
            not (self.step_wise_trajectories and self.advantage_estimator == "reinforce++"),
            "step_wise_trajectories=true and advantage_estimator=reinforce++ exclude each other; "
            "use another estimator",
        )


@chz.chz
class ImportanceOptions(Options):
    """Importance sampling between sampler and trainer"""

    tis: Literal["off", "token", "sequence"] = chz.field(
        default="off",
        doc="Truncated importance sampling between sampler and trainer, with one extra forward pass per step",
    )
    tis_cap: float | None = chz.field(
        default=None, doc="Largest ratio; None: 2 for tis=token, 5 for tis=sequence", validator=above(0)
    )
    tis_sequence_mask: Literal["off", "geometric", "product", "outlier"] = chz.field(
        default="off",
        doc="Train no token of a trajectory whose ratios are out of bounds. geometric: if their geometric "
        "mean is out of bounds; product: if their product is; outlier: if at least one of them is",
    )
    tis_sequence_mask_low: float | None = chz.field(
        default=None, doc="Lower bound of tis_sequence_mask; None: 0.99 geometric, 0.5 product, 1e-4 outlier"
    )
    tis_sequence_mask_high: float | None = chz.field(
        default=None, doc="Upper bound of tis_sequence_mask; None: 1.01 geometric, 2 product, 100 outlier"
    )
    tis_token_mask_low: float | None = chz.field(
        default=None, doc="Train no token whose ratio is below this; None: no bound"
    )
    tis_token_mask_high: float | None = chz.field(
        default=None, doc="Train no token whose ratio is above this; None: no bound"
    )

    @property
    def is_on(self) -> bool:
        """Whether any correction or mask is set, so that the trainer's logprobs are needed."""
        masks = (self.tis_token_mask_low, self.tis_token_mask_high)
        return self.tis != "off" or self.tis_sequence_mask != "off" or masks != (None, None)

    @chz.validate
    def _bounds_enclose_one(self) -> None:
        require(self.tis != "off" or self.tis_cap is None, "tis_cap needs tis=token or tis=sequence")
        sequence_bounds = (self.tis_sequence_mask_low, self.tis_sequence_mask_high)
        require(
            self.tis_sequence_mask != "off" or sequence_bounds == (None, None),
            "tis_sequence_mask_low and tis_sequence_mask_high need tis_sequence_mask=geometric, product or "
            "outlier",
        )
        token_bounds = (self.tis_token_mask_low, self.tis_token_mask_high)
        for name, (low, high) in {
            "tis_sequence_mask": sequence_bounds,
            "tis_token_mask": token_bounds,
        }.items():
            require(
                (low is None or low <= 1) and (high is None or high >= 1),
                f"{name}_low={low} and {name}_high={high} must have 1 between them, because the ratio is 1 "
                "if sampler and trainer agree",
            )


@chz.chz
class StalenessOptions(Options):
    """Rollouts ahead of training"""

    max_staleness: int = chz.field(
        default=0,
        doc="0: on-policy. n: roll out while training, and train no token that was sampled more than n "
        "updates earlier (docs/staleness.md)",
        validator=at_least(0),
    )


@chz.chz
class CurriculumOptions(SeedOptions):
    """Choice of tasks"""

    task_sampling: Literal["uniform", "thompson"] = chz.field(
        default="uniform",
        doc="uniform: every task once per epoch; thompson: Thompson sampling, which prefers tasks with a "
        "success rate near one half",
    )
    exploration_floor: float = chz.field(
        default=0.1, doc="thompson: share of a batch that goes to the tasks that were rolled out longest ago"
    )

    @chz.validate
    def _every_task_is_explored(self) -> None:
        require(
            0 < self.exploration_floor <= 1,
            "exploration_floor must be above 0, so that every task is chosen at some time, and at most 1, "
            f"not {self.exploration_floor}",
        )


@chz.chz
class DynamicSamplingOptions(SeedOptions):
    """Dynamic sampling"""

    dynamic_sampling: Literal["off", "filter", "replace"] = chz.field(
        default="off",
        doc="filter: sample further tasks until batch_size groups have differing rewards (DAPO); "
        "replace: copies of the groups with differing rewards replace the groups with equal rewards",
    )
    dynamic_sampling_max_batches: int = chz.field(
        default=30,
        doc="Maximum number of batches of one step; if they contain too few groups with differing rewards, "
        "the run ends with an error; 0: no limit",
        validator=at_least(0),
    )
    dynamic_sampling_min_replace_ratio: float = chz.field(
        default=0.3,
        doc="replace: if at most this share of a batch's groups has differing rewards, another batch is "
        "sampled",
    )

    @chz.validate
    def _ratio_is_a_share(self) -> None:
        ratio = self.dynamic_sampling_min_replace_ratio
        require(
            0 <= ratio < 1, f"dynamic_sampling_min_replace_ratio must be at least 0 and below 1, not {ratio}"
        )


@chz.chz
class PreparationOptions(
    KlOptions, DistillationOptions, ImportanceOptions, StalenessOptions, AdvantageOptions
):
    """Preparation of datums"""
