"""The trainer's options: one flat chz class, each default written once, each `doc` its --help text."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Literal

import chz

from src.core.length_limits import LengthLimits
from src.learning.advantages import Estimator, describe_estimators

CLOUD_CONTEXT_LIMIT = 32_000  # the seeds' limit for Tinker's cloud
CLIPPED_LOSSES = ("ppo", "cispo")

_NO_PENALTY = "the Tinker API samples without penalties; drop it"
_SERVER_SIDE = "the server chooses it, not the client; drop it"
_KL_IN_ADVANTAGES = "the KL penalty is part of the advantages; use kl_penalty_coef and kl_estimator"
# Options of SkyRL and of the seeds that no Tinker endpoint can honour, each with what to do instead.
REFUSED = {
    "repetition_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "min_p": "the Tinker API has no min_p; drop it",
    "lora_alpha": _SERVER_SIDE,
    "lora_dropout": _SERVER_SIDE,
    "use_kl_loss": _KL_IN_ADVANTAGES,
    "use_kl_in_reward": _KL_IN_ADVANTAGES,
    "kl_loss_coef": _KL_IN_ADVANTAGES,
    "value_clip": "there is no critic behind the Tinker API; drop it",
    "critic_learning_rate": "there is no critic behind the Tinker API; drop it",
    "eps_clip_low": "write loss_fn_config=clip_low_threshold=<1 - eps>",
    "eps_clip_high": "write loss_fn_config=clip_high_threshold=<1 + eps>",
    "clip_ratio_c": "the Tinker API has no dual clip; drop it",
    "use_conversation_multi_turn": "conversations always have several messages; drop it",
    "retokenize_chat_history": "sampled tokens are never encoded again; drop it",
    "batched": "every trial is a conversation of its own; drop it",
}

TAU_BENCH_ONLY = ("train_data", "test_data")
HARBOR_ONLY = ("environment_type", "train_subagents", "max_length_stops", "jobs_quota_gb")

# The ranges of numbers. None is in each where it is the default.
AT_LEAST_ONE = (
    *(
        "lora_rank",
        "batch_size",
        "n_epochs",
        "max_steps",
        "num_substeps",
        "min_group_size",
        "eval_group_size",
        "max_turns",
        "max_tokens",
    ),
    *("context_limit", "max_input_length", "max_generate_length", "max_sequence_length", "max_length_stops"),
    *("max_assistant_response_tokens", "n_parallel_envs", "trial_attempts"),
)
NOT_NEGATIVE = (
    *(
        "seed",
        "save_every",
        "eval_every",
        "temperature",
        "eval_temperature",
        "kl_penalty_coef",
        "weight_decay",
        "grad_clip_norm",
    ),
    *(
        "lr_warmup_steps",
        "max_staleness",
        "dynamic_sampling_max_batches",
        "proactive_summarization_threshold",
    ),
    *(
        "retry_wait_sec",
        "quarantine_after",
        "reconnect_timeout_sec",
        "taxonomy_alpha",
        "judge_prompt_price",
        "judge_completion_price",
    ),
)
ABOVE_ZERO = (
    "jobs_quota_gb",
    "learning_rate",
    "tis_cap",
    "trial_timeout_sec",
    "server_timeout_sec",
    "answer_timeout_sec",
    "stop_timeout_sec",
)


@chz.chz
class TrainerConfig:
    """Options of `python -m src.train key=value ...`."""

    model_name: str = chz.field(doc="Base model as the server names it, e.g. Qwen/Qwen3-4B")
    env: str = chz.field(
        default="harbor",
        doc="Kind of environment: harbor, tau_bench, openenv, one that a package registers, or your own as module:factory",
    )
    tasks_dir: str | None = chz.field(
        default=None,
        doc="Folder of Harbor task folders (each with task.toml, instruction.md, tests/); env=harbor needs it",
    )
    train_data: list[str] | None = chz.field(
        default=None,
        doc="Training tasks (env=tau_bench), beside those of environment_kwargs=domain=...: .jsonl or .parquet files of rows in "
        "the seeds' format, or DOMAIN:SPLIT",
    )
    test_data: list[str] | None = chz.field(
        default=None,
        doc="Held-out tasks in place of the domains' own (env=tau_bench): as train_data, or NAME=... for metrics under that name",
    )
    domain_mixture: list[str] | None = chz.field(
        default=None,
        doc="Shares of the domains in every batch, e.g. retail=0.7,airline=0.3; None: every task once per epoch",
    )
    tokenizer: str | None = chz.field(
        default=None, doc="Tokenizer directory or hub id; None: the model's own, by model_name"
    )
    backend: Literal["tinker", "skyrl-tx"] = chz.field(
        default="tinker", doc="tinker: the cloud; skyrl-tx: a server of your own"
    )
    skyrl_tx_url: str | None = chz.field(
        default=None, doc="Address of your server, e.g. http://localhost:8000 (backend=skyrl-tx)"
    )
    tinker_base_url: str | None = chz.field(
        default=None, doc="Another address of the Tinker cloud; None: the SDK's own"
    )
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="tinker:// path of a training state to start from, optimizer included"
    )

    capabilities: str | None = chz.field(
        default=None,
        doc="capabilities.json of python -m src.probe; what the endpoint was seen not to honour is refused",
    )

    logs_dir: str = chz.field(default="/tmp/terminus2-training", doc="Parent folder of runs")
    log_path: str | None = chz.field(default=None, doc="This run's folder; None: logs_dir/<run name>")
    behavior_if_log_dir_exists: Literal["ask", "delete", "resume", "raise"] = chz.field(
        default="raise",
        doc="When the run's folder holds a run already; resume continues from its last checkpoint",
    )
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None: no wandb")
    trackio_project: str | None = chz.field(
        default=None, doc="trackio project, kept on this machine (scripts/setup.sh trackio); None: no trackio"
    )
    wandb_name: str | None = chz.field(
        default=None, doc="Name of the run; None: <tasks>-<model>-rank<r>-lr<lr>-g<group>-b<batch>-<date>"
    )
    export_path: str | None = chz.field(
        default=None, doc="Folder of the dumped evaluations and training examples; None: the run's own"
    )
    dump_eval_results: bool = chz.field(
        default=True, doc="Dump every evaluation, and examples of training steps 1, 11, 21, ..."
    )
    save_every: int = chz.field(default=20, doc="Steps between checkpoints; 0: only at the end")

    lora_rank: int = chz.field(default=32, doc="LoRA rank, within the server's limit")
    seed: int = chz.field(default=0, doc="Seed of the adapter, the task order and every sample")
    learning_rate: float = chz.field(default=5e-4, doc="Adam's learning rate")
    adam_beta1: float = chz.field(default=0.9, doc="Adam's decay of the mean")
    adam_beta2: float = chz.field(default=0.95, doc="Adam's decay of the variance")
    adam_eps: float = chz.field(default=1e-8, doc="Adam's epsilon")
    weight_decay: float = chz.field(default=0.0, doc="Decoupled weight decay")
    grad_clip_norm: float = chz.field(default=0.0, doc="Clip the global gradient norm to this; 0: off")

    batch_size: int = chz.field(default=1, doc="Tasks (groups) per step")
    group_size: int = chz.field(default=8, doc="Trials per task")
    n_epochs: int = chz.field(default=1, doc="Passes over the training tasks")
    max_steps: int | None = chz.field(default=None, doc="Stop after this many steps; None: all epochs")
    num_substeps: int = chz.field(
        default=1,
        doc="Optimizer steps per batch, each on its own share of the groups (of the trajectories, where groups are fewer)",
    )
    # No dro: its quadratic term has no mask, so it would also train every token that was never sampled.
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = chz.field(
        default="ppo", doc="Policy-gradient loss"
    )
    loss_fn_config: list[str] | None = chz.field(
        default=None,
        doc="Loss settings as key=value,..., e.g. clip_low_threshold=0.8,clip_high_threshold=1.28",
    )
    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"] = (
        chz.field(
            default="token_mean",
            doc="Mean over tokens, over trajectories' token means, trajectories' token sums / max_sequence_length, or prompts' token means",
        )
    )
    normalize_advantages_by_std: bool = chz.field(
        default=True,
        doc="Divide centred rewards by their group's standard deviation; false turns grpo into dr_grpo",
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="Leave groups whose rewards are all equal out of the batch"
    )
    min_group_size: int = chz.field(default=1, doc="Leave out groups with fewer graded trials")
    singleton_advantage: Literal["zero", "raw"] = chz.field(
        default="zero",
        doc="Advantage of a group's only graded trial: nothing, or its reward (SkyRL's behaviour)",
    )
    failed_trial_reward: Literal[0] | None = chz.field(
        default=None,
        doc="None: trials that could not be graded leave the group; 0: they count as reward 0 (SkyRL's behaviour)",
    )
    apply_overlong_filtering: Literal["off", "stop_reason", "eos"] = chz.field(
        default="off",
        doc="Trajectories that keep their reward in the group but train no token (DAPO): stop_reason: those ended by a limit; "
        "eos: those whose last answer was cut",
    )
    kl_penalty_coef: float = chz.field(
        default=0.0, doc="Weight of the KL penalty towards the base model, inside the advantages"
    )

    # SkyRL's estimators, filters and corrections
    advantage_estimator: Estimator = chz.field(
        default="grpo",
        doc=describe_estimators(),
    )
    zero_reward_on_non_stop: bool = chz.field(
        default=False, doc="Reward 0 for trajectories that a limit ended, before advantages"
    )
    zero_reward_on_length_threshold: bool = chz.field(
        default=False,
        doc="Reward 0 for trajectories with an answer longer than max_assistant_response_tokens, before advantages",
    )
    max_assistant_response_tokens: int = chz.field(default=2048, doc="See zero_reward_on_length_threshold")
    step_wise_trajectories: bool = chz.field(
        default=False, doc="Each turn is a training sequence of its own, as SkyRL's second mode"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = chz.field(
        default="k1", doc="Schulman's estimator of the KL penalty, per token"
    )
    task_sampling: Literal["uniform", "signal"] = chz.field(
        default="uniform",
        doc="uniform: every task once per epoch; signal: tasks whose pass rate may lie near one half, from a posterior of each task's",
    )
    exploration_floor: float = chz.field(
        default=0.1, doc="signal: share of a batch that goes to the tasks played longest ago"
    )
    dynamic_sampling: Literal["off", "filter", "replace"] = chz.field(
        default="off",
        doc="filter: sample further tasks until batch_size groups have differing rewards (DAPO); replace: good groups stand for bad ones",
    )
    dynamic_sampling_max_batches: int = chz.field(
        default=30, doc="Batches one step may sample before the run stops; 0: no limit"
    )
    dynamic_sampling_min_replace_ratio: float = chz.field(
        default=0.3, doc="replace: share of good groups above which no batch is sampled anew"
    )
    tis: Literal["off", "token", "sequence"] = chz.field(
        default="off",
        doc="Truncated importance sampling between sampler and trainer, with one extra forward pass per step",
    )
    tis_cap: float | None = chz.field(default=None, doc="Largest ratio; None: 2 by token, 5 by sequence")
    tis_sequence_mask: Literal["off", "geometric", "product", "outlier"] = chz.field(
        default="off",
        doc="Train no token of a trajectory whose mean ratio, product of ratios or any single ratio is out of bounds",
    )
    tis_sequence_mask_low: float | None = chz.field(
        default=None, doc="Lower bound; None: 0.99 geometric, 0.5 product, 1e-4 outlier"
    )
    tis_sequence_mask_high: float | None = chz.field(
        default=None, doc="Upper bound; None: 1.01 geometric, 2 product, 100 outlier"
    )
    tis_token_mask_low: float | None = chz.field(
        default=None, doc="Train no token whose ratio is below; None: no bound"
    )
    tis_token_mask_high: float | None = chz.field(
        default=None, doc="Train no token whose ratio is above; None: no bound"
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = chz.field(
        default="constant", doc="How learning_rate falls to 0 by the end"
    )
    lr_warmup_steps: int = chz.field(
        default=0, doc="Steps over which the learning rate rises from 0, the last of them at its full height"
    )

    max_staleness: int = chz.field(
        default=0,
        doc="0: on-policy. n: play while training, train no token sampled more than n updates before (docs/staleness.md)",
    )
    max_groups_in_flight: int | None = chz.field(
        default=None, doc="Groups being played at once where max_staleness > 0; None: 2 batches"
    )
    stream_groups: bool = chz.field(
        default=False,
        doc="Send each group to the server's gradient as it ends, while others still play; each group weighs the same",
    )
    allow_unclipped_staleness: bool = chz.field(
        default=False,
        doc="Allow loss_fn=importance_sampling with max_staleness > 0, whose ratios nothing bounds",
    )

    max_turns: int | None = chz.field(default=None, doc="Turns per trial; None: no limit")
    temperature: float = chz.field(default=0.7, doc="Sampling temperature of training trials")
    max_tokens: int = chz.field(default=1024, doc="Tokens per answer")
    context_limit: int = chz.field(
        default=32_000, doc="Tokens of a whole conversation, the last answer included"
    )
    max_length_stops: int = chz.field(
        default=3, doc="End a trial after this many answers in a row that were cut at max_tokens"
    )
    # SkyRL's length limits
    max_input_length: int | None = chz.field(
        default=None,
        doc="A longer conversation (strictly) is not answered any more; None: context_limit - 1, the last answer cut to fit",
    )
    max_generate_length: int | None = chz.field(
        default=None, doc="SkyRL's name for max_tokens; None: max_tokens"
    )
    max_sequence_length: int | None = chz.field(
        default=None, doc="Longer training sequences train no token; None: context_limit"
    )
    train_subagents: Literal["none", "all"] = chz.field(
        default="none", doc="all: also train what Terminus-2's summarising sub-agents say"
    )
    enable_summarize: bool = chz.field(
        default=True, doc="Let Terminus-2 summarise its history when the context runs out"
    )
    proactive_summarization_threshold: int = chz.field(
        default=8000, doc="Summarise once fewer tokens than this are free; 0: never ahead"
    )

    environment_type: Literal["auto", "docker", "sandbox", "daytona", "modal", "e2b", "runloop"] = chz.field(
        default="auto",
        doc="Where trials run; auto: Docker where an engine answers, else the sandbox that needs none",
    )
    environment_kwargs: list[str] | None = chz.field(
        default=None, doc="Settings of the environment as key=value,..."
    )
    use_native_tool_calling: bool = chz.field(
        default=False,
        doc="Show an environment's tools in the model's own chat template, where the environment allows it; else in words",
    )
    n_parallel_envs: int = chz.field(default=8, doc="Trials running at once")
    jobs_quota_gb: float = chz.field(
        default=20.0,
        doc="GiB that the trials' files may take in the run's jobs/; past it a trial keeps only its result, reward and log",
    )
    trial_timeout_sec: float | None = chz.field(
        default=None, doc="Deadline of one whole trial in seconds; None: two hours"
    )

    trial_attempts: int = chz.field(
        default=3, doc="Tries of a trial that is lost to its sandbox, the back end or the verifier"
    )
    retry_wait_sec: float = chz.field(
        default=1.0, doc="Wait before the second try; doubles with each further one, up to a minute"
    )
    quarantine_after: int = chz.field(
        default=2,
        doc="Leave a task out once this many of its groups in a row had no trial that could be graded; 0: never",
    )
    max_failure_rate: float = chz.field(
        default=0.5, doc="Stop when more than this share of the latest trials could not be graded; 1: never"
    )
    server_timeout_sec: float = chz.field(
        default=120, doc="Give the server up for lost after this long without a sign of life"
    )
    answer_timeout_sec: float = chz.field(
        default=3600, doc="Longest wait for one answer of the server: opened, sampled, trained or saved"
    )
    reconnect_timeout_sec: float = chz.field(
        default=600,
        doc="Wait this long for a lost server to come back, then go on from the last checkpoint; 0: stop at once",
    )

    stop_timeout_sec: float = chz.field(
        default=120,
        doc="Longest time that a stop (SIGINT, SIGTERM) or a failure takes to finish the step under way and save a checkpoint",
    )

    tau2_home: str | None = chz.field(
        default=None,
        doc="Folder that scripts/setup_tau.sh made of Sierra's tau2-bench (env=tau_bench); TAU2_HOME stands in for it",
    )
    judge_model: str | None = chz.field(
        default=None,
        doc="Model behind judge_base_url that grades what tau2's tasks assert in words, and that taxonomy_feedback asks",
    )
    judge_base_url: str | None = chz.field(
        default=None, doc="OpenAI-compatible endpoint of the judge; its key is OPENAI_API_KEY's"
    )
    judge_prompt_price: float = chz.field(
        default=0.0, doc="Price of the judge's input in USD per million tokens, for judge_cost_usd"
    )
    judge_completion_price: float = chz.field(
        default=0.0, doc="Price of the judge's output in USD per million tokens"
    )
    taxonomy_feedback: bool = chz.field(
        default=False,
        doc="Add a bonus for the absence of MAST's 14 failure modes to training rewards; TAXONOMY_FEEDBACK=true does it too",
    )
    taxonomy_alpha: float = chz.field(
        default=1.0, doc="The bonus of an episode without failures; TAXONOMY_ALPHA overrides it"
    )
    taxonomy_formula: Literal["one_plus_failures", "inverse_failures"] = chz.field(
        default="one_plus_failures",
        doc="one_plus_failures: alpha / (1 + failures); inverse_failures: alpha / max(1, failures)",
    )

    eval_split: float = chz.field(
        default=0.2, doc="Share of the tasks held out when eval_tasks is not given; 0: none"
    )
    eval_tasks: list[str] | None = chz.field(
        default=None,
        doc="Held-out tasks: ids or globs, or (env=harbor) one folder of tasks; eval_split is then ignored",
    )
    eval_group_size: int | None = chz.field(default=None, doc="Trials per held-out task; None: group_size")
    eval_every: int = chz.field(default=10, doc="Steps between evaluations; 0: only before and after")
    eval_before_train: bool = chz.field(default=True, doc="Evaluate what the run starts from, as step 0")
    eval_temperature: float | None = chz.field(
        default=None, doc="Sampling temperature of evaluations; None: temperature"
    )

    @chz.validate
    def _numbers_are_in_range(self) -> None:
        defaults = inspect.signature(TrainerConfig).parameters
        for name in (*AT_LEAST_ONE, *NOT_NEGATIVE, *ABOVE_ZERO):
            if getattr(self, name) is None and defaults[name].default is None:
                continue
            value = getattr(self, name)
            _check(name not in AT_LEAST_ONE or value >= 1, f"{name} must be at least 1, not {value}")
            _check(name not in NOT_NEGATIVE or value >= 0, f"{name} must not be negative, not {value}")
            _check(name not in ABOVE_ZERO or value > 0, f"{name} must be above 0, not {value}")
        for name in ("eval_split", "dynamic_sampling_min_replace_ratio"):
            _check(
                0 <= getattr(self, name) < 1,
                f"{name} must be at least 0 and below 1, not {getattr(self, name)}",
            )
        _check(
            0 <= self.max_failure_rate <= 1,
            f"max_failure_rate must lie between 0 and 1, not {self.max_failure_rate}",
        )
        floor = self.exploration_floor
        _check(
            0 < floor <= 1,
            f"exploration_floor must be above 0, so that every task comes round, and at most 1, not {floor}",
        )

    @chz.validate
    def _back_end_is_complete(self) -> None:
        if self.backend == "skyrl-tx":
            url = self.skyrl_tx_url or ""
            _check(
                url.startswith(("http://", "https://")),
                "backend=skyrl-tx needs skyrl_tx_url=http://host:port",
            )
            _check(
                self.tinker_base_url is None,
                "tinker_base_url is for backend=tinker; use skyrl_tx_url, or drop it",
            )
        else:
            _check(
                self.skyrl_tx_url is None, "skyrl_tx_url needs backend=skyrl-tx; add it, or drop skyrl_tx_url"
            )
            _check(
                self.context_limit <= CLOUD_CONTEXT_LIMIT,
                f"context_limit={self.context_limit} exceeds backend=tinker's {CLOUD_CONTEXT_LIMIT}; lower it or use backend=skyrl-tx",
            )

    @property
    def length_limits(self) -> LengthLimits:
        """Derived defaults follow what was given."""
        return LengthLimits(
            max_input_length=self.context_limit - 1
            if self.max_input_length is None
            else self.max_input_length,
            max_generate_length=self.max_generate_length or self.max_tokens,
            max_sequence_length=self.max_sequence_length or self.context_limit,
            context_limit=self.context_limit,
        )

    @property
    def domain_shares(self) -> dict[str, float]:
        """Of each domain in a batch, 1 together; empty without a mixture."""
        return shares(self.domain_mixture)

    @property
    def estimator(self) -> Estimator:
        """The advantage estimator, once normalize_advantages_by_std has had its say."""
        return (
            "dr_grpo"
            if self.advantage_estimator == "grpo" and not self.normalize_advantages_by_std
            else self.advantage_estimator
        )

    @chz.validate
    def _lengths_fit(self) -> None:
        limits = self.length_limits
        name = "max_tokens" if self.max_generate_length is None else "max_generate_length"
        _check(
            limits.max_generate_length < self.context_limit,
            f"{name}={limits.max_generate_length} leaves no room for a prompt in context_limit={self.context_limit}; lower {name}",
        )
        _check(
            limits.max_sequence_length <= self.context_limit,
            f"max_sequence_length={limits.max_sequence_length} is above context_limit={self.context_limit}; lower it",
        )
        longest = limits.max_input_length + limits.max_generate_length
        _check(
            self.max_input_length is None or longest <= limits.max_sequence_length,
            f"max_input_length={limits.max_input_length} + {name}={limits.max_generate_length} exceed "
            f"max_sequence_length={limits.max_sequence_length}; lower max_input_length",
        )
        threshold = self.proactive_summarization_threshold
        longest_input = min(limits.max_input_length, self.context_limit - limits.max_generate_length)
        _check(
            self.env != "harbor" or not self.enable_summarize or threshold < longest_input,
            f"proactive_summarization_threshold={threshold} would summarise every turn of at most {longest_input} tokens; "
            "lower it, or set enable_summarize=false",
        )

    @chz.validate
    def _groups_can_be_compared(self) -> None:
        _check(
            self.group_size >= (1 if self.singleton_advantage == "raw" else 2),
            f"group_size={self.group_size} leaves nothing to compare; use group_size=2 or more, or singleton_advantage=raw",
        )
        _check(
            self.min_group_size <= self.group_size,
            f"min_group_size={self.min_group_size} is above group_size={self.group_size}; lower it",
        )
        _check(
            self.num_substeps <= self.batch_size * self.group_size,
            f"num_substeps={self.num_substeps} is more than the {self.batch_size * self.group_size} trajectories of a step; lower it",
        )

    @chz.validate
    def _estimators_and_corrections_agree(self) -> None:
        _check(
            self.normalize_advantages_by_std or self.advantage_estimator in ("grpo", "dr_grpo"),
            f"normalize_advantages_by_std=false is for advantage_estimator=grpo, not {self.advantage_estimator}; drop it",
        )
        _check(
            not (self.step_wise_trajectories and self.advantage_estimator == "reinforce++"),
            "step_wise_trajectories=true and advantage_estimator=reinforce++ exclude each other; use another estimator",
        )
        _check(
            not (self.dynamic_sampling != "off" and self.remove_constant_reward_groups),
            f"dynamic_sampling={self.dynamic_sampling} handles groups of equal rewards already; drop remove_constant_reward_groups",
        )
        _check(self.tis != "off" or self.tis_cap is None, "tis_cap needs tis=token or tis=sequence")
        bounds = [self.tis_sequence_mask_low, self.tis_sequence_mask_high]
        _check(
            self.tis_sequence_mask != "off" or bounds == [None, None],
            "tis_sequence_mask_low and tis_sequence_mask_high need tis_sequence_mask=geometric, product or outlier",
        )
        for name in ("tis_sequence_mask", "tis_token_mask"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            _check(
                (low is None or low <= 1) and (high is None or high >= 1),
                f"{name}_low={low} and {name}_high={high} must have 1 between them, the ratio of a token on which both agree",
            )

    @chz.validate
    def _playing_ahead_is_sound(self) -> None:
        ahead, streamed = self.max_staleness > 0, self.stream_groups
        in_flight = self.max_groups_in_flight
        _check(
            in_flight is None or ahead,
            "max_groups_in_flight needs max_staleness=1 or more; add it, or drop max_groups_in_flight",
        )
        _check(
            in_flight is None or in_flight >= self.batch_size,
            f"max_groups_in_flight={in_flight} is below batch_size={self.batch_size}; raise it",
        )
        _check(
            not ahead or self.loss_fn != "importance_sampling" or self.allow_unclipped_staleness,
            "loss_fn=importance_sampling bounds no stale token's ratio; use ppo or cispo, or set allow_unclipped_staleness=true",
        )
        mode = "max_staleness > 0" if ahead else "stream_groups=true"
        _check(
            not (ahead or streamed) or self.dynamic_sampling == "off",
            f"{mode} and dynamic_sampling={self.dynamic_sampling} exclude each other; use remove_constant_reward_groups=true instead",
        )
        _check(
            not (ahead or streamed) or self.task_sampling == "uniform",
            f"{mode} plays tasks in the order of the schedule; drop task_sampling={self.task_sampling}",
        )
        whole_batch = {
            "loss_reduction": self.loss_reduction == "token_mean",
            "advantage_estimator": self.advantage_estimator == "reinforce++",
            "kl_penalty_coef": self.kl_penalty_coef > 0,
            "tis": self.tis != "off",
            "tis_sequence_mask": self.tis_sequence_mask != "off",
            "tis_token_mask_low": self.tis_token_mask_low is not None,
            "tis_token_mask_high": self.tis_token_mask_high is not None,
            "num_substeps": self.num_substeps > 1,
        }
        needing = next((name for name, needs in whole_batch.items() if needs), None)
        _check(
            not streamed or needing is None,
            f"stream_groups=true cannot go with {needing}={getattr(self, needing or 'seed')}, which needs the whole batch"
            + (
                "; use loss_reduction=prompt_mean or sequence_mean"
                if needing == "loss_reduction"
                else "; drop one of them"
            ),
        )

    @chz.validate
    def _a_mixture_has_shares(self) -> None:
        shares(self.domain_mixture)
        for name, neutral in (("task_sampling", "uniform"), ("dynamic_sampling", "off")):
            value = getattr(self, name)
            _check(
                self.domain_mixture is None or value == neutral,
                f"domain_mixture decides what each batch plays; drop {name}={value}",
            )

    @chz.validate
    def _the_environment_takes_its_options(self) -> None:
        for name in TAU_BENCH_ONLY:
            _check(
                self.env == "tau_bench" or getattr(self, name) is None,
                f"{name} is for env=tau_bench, not env={self.env}; drop it",
            )
        if self.env == "harbor":
            _check(self.tasks_dir is not None, "missing: tasks_dir; e.g. tasks_dir=..., or --help")
            _check(
                not self.use_native_tool_calling,
                "use_native_tool_calling: Terminus-2 calls no tools, it types; drop it",
            )
            return
        defaults = inspect.signature(TrainerConfig).parameters
        for name in HARBOR_ONLY:
            _check(
                getattr(self, name) == defaults[name].default,
                f"{name} is for env=harbor, not env={self.env}; drop it",
            )

    @chz.validate
    def _there_is_a_judge_to_ask(self) -> None:
        for one, other in (("judge_model", "judge_base_url"), ("judge_base_url", "judge_model")):
            _check(
                getattr(self, one) is None or getattr(self, other) is not None, f"{one} needs {other} as well"
            )
        _check(
            not self.taxonomy_feedback or self.judge_model is not None,
            "taxonomy_feedback needs a judge: set judge_model=NAME and judge_base_url=http://host:port/v1",
        )

    @chz.validate
    def _pairs_are_pairs(self) -> None:
        pairs(self.environment_kwargs, option="environment_kwargs")
        loss_settings(self.loss_fn_config, loss_fn=self.loss_fn)


def subconfig[View](config: TrainerConfig, view: type[View], **derived: object) -> View:
    """A component's view of the config: the dataclass's fields, by name, but for those that are derived."""
    assert dataclasses.is_dataclass(view)
    return view(
        **{
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(view)
            if field.name not in derived
        },
        **derived,
    )


def pairs(items: list[str] | None, *, option: str) -> dict[str, str]:
    """`["cpus=2", "image=a"]` -> `{"cpus": "2", "image": "a"}`."""
    split = [item.partition("=") for item in items or []]
    for (key, equals, _), item in zip(split, items or [], strict=True):
        _check(
            bool(key and equals),
            f"{option} takes key=value pairs, not {item!r}; write {option}=key=value,other=value",
        )
    return {key: value for key, _, value in split}


def shares(items: list[str] | None) -> dict[str, float]:
    """Domain -> its share, all of them 1 together.

    >>> shares(["retail=3", "airline=1"])
    {'retail': 0.75, 'airline': 0.25}
    """
    weights: dict[str, float] = {}
    for domain, text in pairs(items, option="domain_mixture").items():
        try:
            weights[domain] = float(text)
        except ValueError:
            weights[domain] = 0.0
        _check(
            0 < weights[domain] < float("inf"),
            f"domain_mixture {domain} needs a number above 0, not {text!r}",
        )
    return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}


def loss_settings(items: list[str] | None, *, loss_fn: str) -> dict[str, float]:
    """The loss's numeric settings, none that the loss does not have."""
    known = ("clip_low_threshold", "clip_high_threshold") if loss_fn in CLIPPED_LOSSES else ()
    settings: dict[str, float] = {}
    for key, value in pairs(items, option="loss_fn_config").items():
        _check(
            key in known, f"loss_fn={loss_fn} has no setting {key!r}; it takes {', '.join(known) or 'none'}"
        )
        try:
            settings[key] = float(value)
        except ValueError:
            _check(False, f"loss_fn_config {key} needs a number, not {value!r}")
    low, high = settings.get("clip_low_threshold", 1.0), settings.get("clip_high_threshold", 1.0)
    _check(
        0 <= low <= 1 <= high,
        f"loss_fn_config: clip_low_threshold={low:g} and clip_high_threshold={high:g} bound the ratio itself and must have 1 between them; "
        "for an epsilon write 1 - eps and 1 + eps",
    )
    return settings


def run_name(config: TrainerConfig, *, date: str) -> str:
    """The run's name, unless one was given: what differs between runs comes first."""
    if config.wandb_name:
        return config.wandb_name
    model = config.model_name.replace("/", "-")
    tasks = tasks_name(config)
    return f"{tasks}-{model}-rank{config.lora_rank}-lr{config.learning_rate:g}-g{config.group_size}-b{config.batch_size}-{date}"


def tasks_name(config: TrainerConfig) -> str:
    return (
        Path(config.tasks_dir).expanduser().resolve().name
        if config.tasks_dir
        else config.env.rpartition(":")[2]
    )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
