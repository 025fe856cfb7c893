"""The trainer's options: one flat chz class, each default written once, each `doc` its --help text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import chz

CLOUD_CONTEXT_LIMIT = 32_000  # the seeds' limit for Tinker's cloud
CLIPPED_LOSSES = ("ppo", "cispo")


@chz.chz
class TrainerConfig:
    """Options of `python -m src.train key=value ...`."""

    model_name: str = chz.field(doc="Base model as the server names it, e.g. Qwen/Qwen3-4B")
    tasks_dir: str = chz.field(doc="Folder of Harbor task folders (each with task.toml, instruction.md, tests/)")
    tokenizer: str | None = chz.field(default=None, doc="Tokenizer directory or hub id; None: the model's own, by model_name")
    backend: Literal["tinker", "skyrl-tx"] = chz.field(default="tinker", doc="tinker: the cloud; skyrl-tx: a server of your own")
    skyrl_tx_url: str | None = chz.field(default=None, doc="Address of your server, e.g. http://localhost:8000 (backend=skyrl-tx)")
    tinker_base_url: str | None = chz.field(default=None, doc="Another address of the Tinker cloud; None: the SDK's own")
    load_checkpoint_path: str | None = chz.field(default=None, doc="tinker:// path of a training state to start from, optimizer included")

    logs_dir: str = chz.field(default="/tmp/terminus2-training", doc="Parent folder of runs")
    log_path: str | None = chz.field(default=None, doc="This run's folder; None: logs_dir/<run name>")
    behavior_if_log_dir_exists: Literal["ask", "delete", "resume", "raise"] = chz.field(
        default="raise", doc="When the run's folder holds a run already; resume continues from its last checkpoint"
    )
    wandb_project: str | None = chz.field(default=None, doc="Weights & Biases project; None: no wandb")
    wandb_name: str | None = chz.field(default=None, doc="Name of the run; None: <tasks>-<model>-rank<r>-lr<lr>-g<group>-b<batch>-<date>")
    save_every: int = chz.field(default=20, doc="Steps between checkpoints; 0: only at the end")

    lora_rank: int = chz.field(default=32, doc="LoRA rank, a power of two within the server's limit")
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
        default=1, doc="Optimizer steps per batch, each on its own share of the groups (of the trajectories, where groups are fewer)"
    )
    # No dro: its quadratic term has no mask, so it would also train every token that was never sampled.
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = chz.field(default="ppo", doc="Policy-gradient loss")
    loss_fn_config: list[str] | None = chz.field(
        default=None, doc="Loss settings as key=value,..., e.g. clip_low_threshold=0.8,clip_high_threshold=1.28"
    )
    loss_reduction: Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm"] = chz.field(
        default="token_mean", doc="Mean over tokens, over trajectories' token means, or trajectories' token sums / context_limit"
    )
    normalize_advantages_by_std: bool = chz.field(default=True, doc="Divide centred rewards by their group's standard deviation")
    remove_constant_reward_groups: bool = chz.field(default=False, doc="Leave groups whose rewards are all equal out of the batch")
    min_group_size: int = chz.field(default=1, doc="Leave out groups with fewer graded trials")
    singleton_advantage: Literal["zero", "raw"] = chz.field(
        default="zero", doc="Advantage of a group's only graded trial: nothing, or its reward (SkyRL's behaviour)"
    )
    failed_trial_reward: Literal[0] | None = chz.field(
        default=None, doc="None: trials that could not be graded leave the group; 0: they count as reward 0 (SkyRL's behaviour)"
    )
    apply_overlong_filtering: Literal["off", "stop_reason"] = chz.field(
        default="off", doc="stop_reason: trajectories ended by a limit keep their reward in the group but train no token (DAPO)"
    )
    kl_penalty_coef: float = chz.field(default=0.0, doc="Weight of the KL penalty towards the base model, inside the advantages")

    max_turns: int | None = chz.field(default=None, doc="Turns per trial; None: no limit")
    temperature: float = chz.field(default=0.7, doc="Sampling temperature of training trials")
    max_tokens: int = chz.field(default=1024, doc="Tokens per answer")
    context_limit: int = chz.field(default=32_000, doc="Tokens of a whole conversation, the last answer included")
    max_length_stops: int = chz.field(default=3, doc="End a trial after this many answers in a row that were cut at max_tokens")
    enable_summarize: bool = chz.field(default=True, doc="Let Terminus-2 summarise its history when the context runs out")
    proactive_summarization_threshold: int = chz.field(default=8000, doc="Summarise once fewer tokens than this are free; 0: never ahead")

    environment_type: Literal["auto", "docker", "sandbox", "daytona", "modal", "e2b", "runloop"] = chz.field(
        default="auto", doc="Where trials run; auto: Docker where an engine answers, else the sandbox that needs none"
    )
    environment_kwargs: list[str] | None = chz.field(default=None, doc="Settings of the environment as key=value,...")
    n_parallel_envs: int = chz.field(default=8, doc="Trials running at once")
    trial_timeout_sec: float | None = chz.field(default=None, doc="Deadline of one whole trial in seconds; None: two hours")

    trial_attempts: int = chz.field(default=3, doc="Tries of a trial that is lost to its sandbox, the back end or the verifier")
    retry_wait_sec: float = chz.field(default=1.0, doc="Wait before the second try; doubles with each further one, up to a minute")
    quarantine_after: int = chz.field(
        default=2, doc="Leave a task out once this many of its groups in a row had no trial that could be graded; 0: never"
    )
    max_failure_rate: float = chz.field(
        default=0.5, doc="Stop when more than this share of the latest trials could not be graded; 1: never"
    )
    server_timeout_sec: float = chz.field(default=120, doc="Give the server up for lost after this long without a sign of life")
    answer_timeout_sec: float = chz.field(default=3600, doc="Longest wait for one answer of the server, sampled, trained or saved")
    reconnect_timeout_sec: float = chz.field(
        default=600, doc="Wait this long for a lost server to come back, then go on from the last checkpoint; 0: stop at once"
    )

    eval_split: float = chz.field(default=0.2, doc="Share of the tasks held out when eval_tasks is not given; 0: none")
    eval_tasks: list[str] | None = chz.field(
        default=None, doc="Held-out tasks: ids or globs within tasks_dir, or one folder of tasks; eval_split is then ignored"
    )
    eval_group_size: int | None = chz.field(default=None, doc="Trials per held-out task; None: group_size")
    eval_every: int = chz.field(default=10, doc="Steps between evaluations; 0: only before and after")
    eval_temperature: float | None = chz.field(default=None, doc="Sampling temperature of evaluations; None: temperature")

    @chz.validate
    def _numbers_are_in_range(self) -> None:
        at_least_one = ("lora_rank", "batch_size", "n_epochs", "num_substeps", "min_group_size", "max_tokens", "context_limit")
        for name in (*at_least_one, "max_length_stops", "n_parallel_envs"):
            _check(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_steps", "max_turns", "eval_group_size"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} must be at least 1 or None, not {value}")
        not_negative = ("save_every", "eval_every", "temperature", "kl_penalty_coef", "weight_decay", "grad_clip_norm")
        for name in (*not_negative, "proactive_summarization_threshold", "seed"):
            _check(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")
        _check(self.learning_rate > 0, f"learning_rate must be above 0, not {self.learning_rate}")
        _check(0 <= self.eval_split < 1, f"eval_split must be at least 0 and below 1, not {self.eval_split}")
        _check(self.eval_temperature is None or self.eval_temperature >= 0, "eval_temperature must not be negative")
        _check(self.trial_timeout_sec is None or self.trial_timeout_sec > 0, "trial_timeout_sec must be above 0 or None")

    @chz.validate
    def _faults_have_bounds(self) -> None:
        _check(self.trial_attempts >= 1, f"trial_attempts must be at least 1, not {self.trial_attempts}")
        for name in ("retry_wait_sec", "quarantine_after", "reconnect_timeout_sec"):
            _check(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("server_timeout_sec", "answer_timeout_sec"):
            _check(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name)}")
        _check(0 <= self.max_failure_rate <= 1, f"max_failure_rate must lie between 0 and 1, not {self.max_failure_rate}")

    @chz.validate
    def _back_end_is_complete(self) -> None:
        if self.backend == "skyrl-tx":
            url = self.skyrl_tx_url or ""
            _check(url.startswith(("http://", "https://")), "backend=skyrl-tx needs skyrl_tx_url=http://host:port")
            _check(self.tinker_base_url is None, "tinker_base_url is for backend=tinker; use skyrl_tx_url, or drop it")
        else:
            _check(self.skyrl_tx_url is None, "skyrl_tx_url needs backend=skyrl-tx; add it, or drop skyrl_tx_url")
            _check(
                self.context_limit <= CLOUD_CONTEXT_LIMIT,
                f"context_limit={self.context_limit} exceeds backend=tinker's {CLOUD_CONTEXT_LIMIT}; lower it or use backend=skyrl-tx",
            )

    @chz.validate
    def _lengths_fit(self) -> None:
        _check(
            self.max_tokens < self.context_limit,
            f"max_tokens={self.max_tokens} leaves no room for a prompt in context_limit={self.context_limit}; lower max_tokens",
        )
        threshold = self.proactive_summarization_threshold
        _check(
            not self.enable_summarize or threshold < self.context_limit - self.max_tokens,
            f"proactive_summarization_threshold={threshold} would summarise every turn of context_limit={self.context_limit}; "
            "lower it, or set enable_summarize=false",
        )

    @chz.validate
    def _groups_can_be_compared(self) -> None:
        _check(
            self.group_size >= (1 if self.singleton_advantage == "raw" else 2),
            f"group_size={self.group_size} leaves nothing to compare; use group_size=2 or more, or singleton_advantage=raw",
        )
        _check(
            self.min_group_size <= self.group_size, f"min_group_size={self.min_group_size} is above group_size={self.group_size}; lower it"
        )
        _check(
            self.num_substeps <= self.batch_size * self.group_size,
            f"num_substeps={self.num_substeps} is more than the {self.batch_size * self.group_size} trajectories of a step; lower it",
        )

    @chz.validate
    def _pairs_are_pairs(self) -> None:
        pairs(self.environment_kwargs, option="environment_kwargs")
        loss_settings(self.loss_fn_config, loss_fn=self.loss_fn)


def pairs(items: list[str] | None, *, option: str) -> dict[str, str]:
    """`["cpus=2", "image=a"]` -> `{"cpus": "2", "image": "a"}`."""
    split = [item.partition("=") for item in items or []]
    for (key, equals, _), item in zip(split, items or [], strict=True):
        _check(bool(key and equals), f"{option} takes key=value pairs, not {item!r}; write {option}=key=value,other=value")
    return {key: value for key, _, value in split}


def loss_settings(items: list[str] | None, *, loss_fn: str) -> dict[str, float]:
    """The loss's numeric settings, none that the loss does not have."""
    known = ("clip_low_threshold", "clip_high_threshold") if loss_fn in CLIPPED_LOSSES else ()
    settings: dict[str, float] = {}
    for key, value in pairs(items, option="loss_fn_config").items():
        _check(key in known, f"loss_fn={loss_fn} has no setting {key!r}; it takes {', '.join(known) or 'none'}")
        try:
            settings[key] = float(value)
        except ValueError:
            _check(False, f"loss_fn_config {key} needs a number, not {value!r}")
    return settings


def run_name(config: TrainerConfig, *, date: str) -> str:
    """The run's name, unless one was given: what differs between runs comes first."""
    if config.wandb_name:
        return config.wandb_name
    model = config.model_name.replace("/", "-")
    tasks = Path(config.tasks_dir).expanduser().resolve().name
    return f"{tasks}-{model}-rank{config.lora_rank}-lr{config.learning_rate:g}-g{config.group_size}-b{config.batch_size}-{date}"


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
