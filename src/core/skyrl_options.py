"""Names of options in SkyRL and in scripts for it, and the options of this trainer that take their values.

`trainer.epochs=2` is taken as `n_epochs=2`. A name may also be written without its configuration groups, such
as `eval_interval` for `trainer.eval_interval`, unless the program has an option of that name. Every other
name of SkyRL is refused with a reason, because an ignored or guessed option could change what a run trains
on.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence

from src.core.errors import ConfigError

GROUPS = ("data.", "trainer.", "generator.", "environment.")
# SkyRL's name -> the argument of this trainer, where `{}` is the value and `<name>` the last part of SkyRL's
# name. Of several alternatives, separated by `|`, a program takes the first one whose option it has. Values
# of `test_data` are collected into one list.
TAKEN: dict[str, str] = {
    "data.train_data": "train_data={}",
    "data.val_data": "test_data={}",
    "data.retail_val_data": "test_data=retail_val={}",
    "data.test_data.<name>": "test_data=<name>={}",
    "trainer.epochs": "n_epochs={}",
    "trainer.train_batch_size": "batch_size={}",
    "trainer.eval_interval": "eval_every={}",
    "trainer.eval_before_train": "eval_before_train={}",
    "trainer.ckpt_interval": "save_every={}",
    "trainer.export_path": "export_path={}",
    "trainer.dump_eval_results": "dump_eval_results={}",
    "trainer.project_name": "wandb_project={}",
    "trainer.run_name": "wandb_name={}",
    "trainer.seed": "seed={}",
    "trainer.policy.model.path": "model_name={}",
    "trainer.policy.model.lora_rank": "lora_rank={}",
    "trainer.policy.model.lora.rank": "lora_rank={}",
    "trainer.policy.model.lora_alpha": "lora_alpha={}",
    "trainer.policy.model.lora.alpha": "lora_alpha={}",
    "trainer.policy.optimizer_config.lr": "learning_rate={}",
    "trainer.policy.optimizer_config.weight_decay": "weight_decay={}",
    "trainer.policy.optimizer_config.max_grad_norm": "grad_clip_norm={}",
    "trainer.policy.optimizer_config.num_warmup_steps": "lr_warmup_steps={}",
    "trainer.algorithm.advantage_estimator": "advantage_estimator={}",
    "trainer.algorithm.grpo_norm_by_std": "normalize_advantages_by_std={}",
    "trainer.algorithm.loss_reduction": "loss_reduction={}",
    "trainer.algorithm.kl_estimator_type": "kl_estimator={}",
    "trainer.algorithm.zero_variance_filter": "remove_constant_reward_groups={}",
    "trainer.algorithm.max_seq_len": "max_sequence_length={}",
    "trainer.algorithm.dynamic_sampling.max_sample_batches": "dynamic_sampling_max_batches={}",
    "trainer.algorithm.dynamic_sampling.min_replace_ratio": "dynamic_sampling_min_replace_ratio={}",
    "generator.n_samples_per_prompt": "group_size={}|n_samples={}",
    "generator.eval_n_samples_per_prompt": "eval_group_size={}|n_samples={}",
    "generator.max_turns": "max_turns={}",
    "generator.max_input_length": "max_input_length={}",
    "generator.sampling_params.max_generate_length": "max_generate_length={}",
    "generator.sampling_params.temperature": "temperature={}",
    "generator.eval_sampling_params.temperature": "eval_temperature={}|temperature={}",
    "generator.eval_sampling_params.top_p": "eval_top_p={}|top_p={}",
    "generator.use_native_tool_calling": "use_native_tool_calling={}",
    "generator.step_wise_trajectories": "step_wise_trajectories={}",
    "generator.zero_reward_on_non_stop": "zero_reward_on_non_stop={}",
    "generator.zero_reward_on_length_threshold": "zero_reward_on_length_threshold={}",
    "generator.max_assistant_response_tokens": "max_assistant_response_tokens={}",
    "environment.env_class": "env={}",
    "environment.skyrl_gym.max_env_workers": "n_parallel_envs={}",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling": "use_native_tool_calling={}",
    "environment.skyrl_gym.tau_bench.TAXONOMY_FEEDBACK": "taxonomy_feedback={}",
    "environment.skyrl_gym.tau_bench.TAXONOMY_ALPHA": "taxonomy_alpha={}",
}
_SHARES = "write num_substeps=<train_batch_size / policy_mini_batch_size>, the optimizer steps per batch"
_PLACEMENT = "it has no counterpart, because the server places and runs the models; remove it"
_ON_POLICY = "training assumes samples from the whole distribution of the policy; remove it"
_NO_CRITIC = "the Tinker API has no critic; remove it"
_SERVER_SIDE = "the server chooses these settings, not the client; remove it"
_LAYERS = (
    "the adapter covers all linear layers; remove it, or write train_attn=false, train_mlp=false or "
    "train_unembed=false"
)
NO_DROPOUT = "the Tinker API has no LoRA dropout; remove it"
_TEMPLATE = "the chat template is that of the model's tokenizer; remove it, or write tokenizer=DIR_OR_HUB_ID"
_CHECKPOINTS = "the server keeps the checkpoints; remove it"
# SkyRL's option or configuration group -> why it is refused. An option without an entry has the reason of
# `src.config.REFUSED` for the last part of its name, or else that of the innermost group that has an entry.
REFUSED_BY_REASON: dict[str, str] = {
    "data": "tasks come from tasks_dir, train_data and test_data; remove it",
    "data.test_data": "write test_data=NAME=FILE,OTHER=FILE",
    "trainer": _PLACEMENT,
    "trainer.policy_mini_batch_size": _SHARES,
    "trainer.eval_batch_size": "all held-out tasks are evaluated, n_parallel_envs trials at once; remove it",
    "trainer.update_epochs_per_batch": "every batch is trained once; remove it",
    "trainer.max_prompt_length": "tasks of any length are used; remove it, or write max_input_length=... to "
    "limit conversations",
    "trainer.logger": "write wandb_project=NAME or trackio_project=NAME; metrics.jsonl is always written",
    "trainer.resume_mode": "write behavior_if_log_dir_exists=resume, with the log_path of the run",
    "trainer.resume_path": "write load_checkpoint_path=PATH",
    "trainer.ckpt_path": _CHECKPOINTS,
    "trainer.max_ckpts_to_keep": _CHECKPOINTS,
    "trainer.hf_save_interval": "remove it; python -m skyrl_tx_server.export exports a checkpoint",
    "trainer.critic": _NO_CRITIC,
    "trainer.critic_mini_batch_size": _NO_CRITIC,
    "trainer.ref": "the base model is the reference; write kl_penalty_coef=... for a KL penalty",
    "trainer.policy.model.lora": _SERVER_SIDE,
    **dict.fromkeys(("trainer.policy.model.lora_dropout", "trainer.policy.model.lora.dropout"), NO_DROPOUT),
    **dict.fromkeys(("trainer.target_modules", "trainer.policy.model.lora.target_modules"), _LAYERS),
    "trainer.policy.optimizer_config": "write adam_beta1, adam_beta2 or adam_eps",
    "trainer.policy.optimizer_config.scheduler": "write lr_schedule=constant, linear or cosine",
    "trainer.algorithm": (
        "the trainer has no such option; docs/options.md lists its losses and advantage estimators"
    ),
    "trainer.algorithm.policy_loss_type": "write loss_fn=ppo, cispo or importance_sampling",
    "trainer.algorithm.dynamic_sampling.type": "write dynamic_sampling=filter or replace",
    "trainer.algorithm.use_tis": "write tis=token or sequence",
    "trainer.algorithm.tis_imp_ratio_cap": "write tis=token and tis_cap=...",
    "generator": _PLACEMENT,
    "generator.apply_overlong_filtering": "write apply_overlong_filtering=stop_reason",
    "generator.sampling_params": "the Tinker API has no such sampling parameter; remove it",
    "generator.sampling_params.top_p": _ON_POLICY,
    "generator.sampling_params.top_k": _ON_POLICY,
    "generator.sampling_params.logprobs": "logprobs are always recorded; remove it",
    "generator.eval_sampling_params": "only eval_temperature and eval_top_p can differ from training; remove "
    "it",
    "generator.chat_template": _TEMPLATE,
    "generator.custom_chat_template": _TEMPLATE,
    "environment": "write environment_kwargs=key=value,... for settings of an environment",
}
NAMES = (*TAKEN, *REFUSED_BY_REASON)


def taken_arguments(
    argv: Sequence[str], option_names: Collection[str], refused: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return (all arguments with this trainer's names, the arguments that were converted from SkyRL's names).

    `option_names` are the options of the program. `refused` maps the last part of a name to the reason why
    the name is refused. Raises ConfigError for an option of SkyRL that has no counterpart in the program.
    """
    arguments: list[str] = []
    taken: list[str] = []
    test_data: list[str] = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        full_name = skyrl_name(name.lstrip("+"), option_names, refused) if equals else None
        if full_name is None:
            arguments.append(argument)
            continue
        translated = _translated(full_name, _plain(value), option_names, refused)
        taken.append(translated)
        if translated.startswith("test_data="):
            test_data.append(translated.removeprefix("test_data="))
        else:
            arguments.append(translated)
    if test_data:  # one argument, because a later argument of the same name replaces an earlier one
        test_data = [
            argument.removeprefix("test_data=") for argument in arguments if argument.startswith("test_data=")
        ] + test_data
        arguments = [argument for argument in arguments if not argument.startswith("test_data=")]
        arguments.append(f"test_data={','.join(test_data)}")
    return arguments, taken


def skyrl_name(name: str, option_names: Collection[str], refused: Collection[str]) -> str | None:
    """Return the full name of the SkyRL option that ends with `name`, or `name` itself if it begins with one
    of GROUPS.

    Returns None if NAMES has no such option, or if `name` is in `option_names` or in `refused`.

    >>> skyrl_name("eval_interval", (), ()), skyrl_name("seed", ("seed",), ())
    ('trainer.eval_interval', None)
    """
    if name.startswith(GROUPS):
        return name
    if name in option_names or name in refused:
        return None
    return next((full for full in NAMES if full.endswith(f".{name}")), None)


def reason_against(name: str, refused: Mapping[str, str]) -> str:
    last_part = name.rpartition(".")[2]
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    prefix = next((prefix for prefix in prefixes if prefix in REFUSED_BY_REASON), "trainer")
    return refused[last_part] if last_part in refused and prefix != name else REFUSED_BY_REASON[prefix]


def _translated(name: str, value: str, option_names: Collection[str], refused: Mapping[str, str]) -> str:
    """Return the argument with this trainer's name. Raises ConfigError if the program has no such option."""
    group, _, last_part = name.rpartition(".")
    pattern = TAKEN.get(name) or TAKEN.get(f"{group}.<name>")
    if pattern is None:
        raise ConfigError(f"{name} cannot be honoured: {reason_against(name, refused)}")
    choices = [choice.partition("=") for choice in pattern.split("|")]
    for option, _, template in choices:
        if option in option_names:
            files = value.split(",") if option == "test_data" else [value]
            parts = [template.replace("<name>", last_part).replace("{}", file) for file in files]
            return f"{option}={','.join(parts)}"
    raise ConfigError(f"{name} corresponds to {choices[0][0]}, which this program does not have; remove it")


def _plain(value: str) -> str:
    """Convert a value from Hydra's notation to that of this command line.

    >>> _plain("['a.parquet', 'b.parquet']"), _plain("[a, b]"), _plain('"x"'), _plain("0.5")
    ('a.parquet,b.parquet', 'a,b', 'x', '0.5')
    """
    if value.startswith("[") and value.endswith("]"):
        return ",".join(_plain(item.strip()) for item in value[1:-1].split(",") if item.strip())
    if value[:1] in ("'", '"'):
        try:
            return str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            return value
    return value
