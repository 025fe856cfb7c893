"""The trainer's configuration: the options of all components and of the training loop, and the rules that
restrict their combinations.

The command line is flat: `python -m src.train key=value ...`. Each component declares its options in its own
package, usually in the module `options`, and `TrainerConfig` inherits these option classes.
"""

from __future__ import annotations

from pathlib import Path

import chz

from src.core.options import above, at_least, finite, require, share
from src.core.skyrl_options import NO_DROPOUT
from src.envs.options import EnvironmentOptions, TaskOptions
from src.learning.advantages import ADVANTAGE_ESTIMATORS
from src.learning.options import CLIPPED_LOSSES, LearnerOptions, PreparationOptions
from src.policy.options import AdapterOptions, WatchdogOptions
from src.records.options import DumpOptions, RunDirectoryOptions, TrackingOptions
from src.rollouts.options import GroupOptions, JudgeOptions, RolloutOptions, ScheduleOptions

_NO_PENALTY = "the Tinker API samples without penalties; remove it"
_KL_IN_ADVANTAGES = "the KL penalty is part of the advantages; use kl_penalty_coef and kl_estimator"
_NO_CRITIC = "the Tinker API has no critic; remove it"
_WHOLE_DISTRIBUTION = (
    "training assumes samples from the whole distribution of the policy; remove it, or use eval_top_p for "
    "evaluations"
)
# Refused option of SkyRL or of a script for SkyRL -> the reason for the refusal, or the option to write
# instead.
REFUSED = {
    "repetition_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "min_p": "the Tinker API has no min_p; remove it",
    "top_p": _WHOLE_DISTRIBUTION,
    "top_k": _WHOLE_DISTRIBUTION,
    "enable_thinking": "training prompts switch thinking off; python -m src.evaluate enable_thinking=true "
    "evaluates with thinking",
    "lora_dropout": NO_DROPOUT,
    "use_kl_loss": _KL_IN_ADVANTAGES,
    "use_kl_in_reward": _KL_IN_ADVANTAGES,
    "kl_loss_coef": _KL_IN_ADVANTAGES,
    "value_clip": _NO_CRITIC,
    "critic_learning_rate": _NO_CRITIC,
    "eps_clip_low": "write loss_fn_config=clip_low_threshold=<1 - eps>",
    "eps_clip_high": "write loss_fn_config=clip_high_threshold=<1 + eps>",
    "clip_ratio_c": "the Tinker API has no dual clip; remove it",
    "use_conversation_multi_turn": "every answer is a separate message; remove it",
    "retokenize_chat_history": "sampled tokens are never encoded again; remove it",
    "batched": "every trial is a separate conversation; remove it",
}


# The sections in --help and in docs/options.md, in order. The first line of the docstring of an option class
# is the name of its section.
SECTIONS = (
    "Model and server",
    "Environment and tasks",
    "Run directory",
    "Experiment tracking",
    "Batches and schedule",
    "Training loop",
    "Optimizer and loss",
    "Advantages and loss reduction",
    "Reward rules and group filters",
    "KL penalty",
    "Distillation",
    "Importance sampling between sampler and trainer",
    "Choice of tasks",
    "Dynamic sampling",
    "Rollouts ahead of training",
    "Agent and lengths",
    "Trials",
    "Harbor trials and Terminus-2",
    "tau-bench",
    "Judge",
    "Failures and timeouts",
)


@chz.chz
class LoopOptions(AdapterOptions, WatchdogOptions, RunDirectoryOptions):
    """Training loop"""

    save_every: int = chz.field(
        default=20, doc="Steps between checkpoints; 0: only at the end", validator=at_least(0)
    )
    eval_every: int = chz.field(
        default=10,
        doc="Steps between evaluations; 0: none between the initial and the final evaluation",
        validator=at_least(0),
    )
    reconnect_timeout_s: float = chz.field(
        default=600,
        doc="Longest wait for a lost server, in seconds; when the server has returned, the run continues "
        "from its last checkpoint. 0: stop at once",
        validator=at_least(0),
    )
    stop_timeout_s: float = chz.field(
        default=120,
        doc="Longest time, in seconds, that the run takes to finish its update and to save a checkpoint "
        "after SIGINT, SIGTERM or a failure",
        validator=above(0),
    )


@chz.chz
class TrainerConfig(
    DumpOptions,
    TrackingOptions,
    ScheduleOptions,
    GroupOptions,
    PreparationOptions,
    LearnerOptions,
    LoopOptions,
    RolloutOptions,
    JudgeOptions,
    EnvironmentOptions,
):
    """Training loop"""

    capabilities: str | None = chz.field(
        default=None,
        doc="capabilities.json of python -m src.evaluate.probe; options that the probed endpoint does not "
        "honour are refused. None: options are not checked against an endpoint",
    )
    allow_unclipped_staleness: bool = chz.field(
        default=False,
        doc="Allow max_staleness > 0 with every loss, and not only with ppo and cispo, which bound the "
        "importance ratio",
    )
    eval_before_train: bool = chz.field(default=True, doc="Evaluate the initial weights, as step 0")
    eval_group_size: int | None = chz.field(
        default=None, doc="Trials per held-out task; None: group_size", validator=at_least(1)
    )
    eval_temperature: float | None = chz.field(
        default=None,
        doc="Sampling temperature of evaluations; None: temperature",
        validator=[at_least(0), finite],
    )
    eval_top_p: float = chz.field(
        default=1.0,
        doc="Evaluations sample from the most likely tokens that together have this probability; 1: from all",
        validator=share,
    )

    @chz.validate
    def _batch_options_agree(self) -> None:
        estimator = ADVANTAGE_ESTIMATORS[self.estimator]
        require(
            self.singleton_advantage != "raw" or "singleton_advantage" in estimator.options,
            f"singleton_advantage=raw has no effect with advantage_estimator={self.advantage_estimator}; "
            "remove it, or use advantage_estimator=grpo or dr_grpo",
        )
        trains_single_trials = estimator.scale is None or self.singleton_advantage == "raw"
        require(
            self.group_size >= (1 if trains_single_trials else 2),
            f"group_size={self.group_size}: a single trial has no other reward to compare with; use "
            "group_size=2 or more, advantage_estimator=reinforce++, or singleton_advantage=raw with "
            "advantage_estimator=grpo or dr_grpo",
        )
        require(
            self.min_group_size <= self.group_size,
            f"min_group_size={self.min_group_size} is above group_size={self.group_size}; lower it",
        )
        num_trajectories = self.batch_size * self.group_size
        require(
            self.num_substeps <= num_trajectories,
            f"num_substeps={self.num_substeps} is more than the {num_trajectories} trajectories of a step; "
            "lower it",
        )
        require(
            self.dynamic_sampling == "off" or not self.remove_constant_reward_groups,
            f"dynamic_sampling={self.dynamic_sampling} handles groups of equal rewards already; remove "
            "remove_constant_reward_groups",
        )

    @chz.validate
    def _one_option_chooses_the_tasks(self) -> None:
        require(
            self.domain_mixture is None or self.task_sampling == "uniform",
            f"domain_mixture chooses the tasks of each batch; remove task_sampling={self.task_sampling}",
        )
        require(
            self.domain_mixture is None or self.dynamic_sampling == "off",
            "domain_mixture chooses the tasks of each batch; remove "
            f"dynamic_sampling={self.dynamic_sampling}",
        )
        if self.uses_pipeline:
            mode = "max_staleness > 0" if self.max_staleness else "stream_groups=true"
            require(
                self.dynamic_sampling == "off",
                f"{mode} and dynamic_sampling={self.dynamic_sampling} exclude each other; "
                "use remove_constant_reward_groups=true instead",
            )
            require(
                self.task_sampling == "uniform",
                f"{mode} rolls out tasks in the order of the schedule; remove "
                f"task_sampling={self.task_sampling}",
            )

    @chz.validate
    def _ratios_of_stale_tokens_are_bounded(self) -> None:
        is_allowed = self.loss_fn in CLIPPED_LOSSES or self.allow_unclipped_staleness
        require(
            self.max_staleness == 0 or is_allowed,
            f"max_staleness={self.max_staleness} needs a loss that bounds the importance ratio of stale "
            f"tokens; use loss_fn=ppo or cispo instead of {self.loss_fn}, or set "
            "allow_unclipped_staleness=true",
        )

    @chz.validate
    def _stream_groups_excludes_options_of_whole_batches(self) -> None:
        if not self.stream_groups:
            return
        require(
            self.loss_reduction != "token_mean",
            "stream_groups=true excludes loss_reduction=token_mean, which needs the whole batch; "
            "use loss_reduction=prompt_mean, sequence_mean or seq_mean_token_sum_norm",
        )
        batch_options = {  # option -> whether it is set
            "advantage_estimator=reinforce++": self.advantage_estimator == "reinforce++",
            f"kl_penalty_coef={self.kl_penalty_coef}": self.kl_penalty_coef > 0,
            f"teacher={self.teacher}": self.teacher is not None,
            f"tis={self.tis}": self.tis != "off",
            f"tis_sequence_mask={self.tis_sequence_mask}": self.tis_sequence_mask != "off",
            f"tis_token_mask_low={self.tis_token_mask_low}": self.tis_token_mask_low is not None,
            f"tis_token_mask_high={self.tis_token_mask_high}": self.tis_token_mask_high is not None,
            f"num_substeps={self.num_substeps}": self.num_substeps > 1,
        }
        for option, is_set in batch_options.items():
            require(
                not is_set,
                f"stream_groups=true excludes {option}, which is applied to the whole batch; remove one of "
                "them",
            )


def run_name(config: TrainerConfig, *, date: str) -> str:
    """Return the name of the run: `wandb_name`, or a name made from options and the date."""
    if config.wandb_name:
        return config.wandb_name
    model = config.model_name.replace("/", "-")
    return (
        f"{tasks_name(config)}-{model}-rank{config.lora_rank}-lr{config.learning_rate:g}"
        f"-g{config.group_size}-b{config.batch_size}-{date}"
    )


def tasks_name(options: TaskOptions) -> str:
    """Return a name for the tasks: the name of the directory `tasks_dir`, else the name of the first file of
    `data`, else the name of the environment. The name of `env=module:factory` is `factory`.
    """
    if options.tasks_dir:
        return Path(options.tasks_dir).expanduser().resolve().name
    if options.data:
        return Path(options.data[0]).stem
    return options.env.rpartition(":")[2]
