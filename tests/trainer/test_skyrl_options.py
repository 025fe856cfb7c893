"""Tests that each option name of SkyRL sets one of our options or is refused with a reason."""

from __future__ import annotations

import chz
import pytest

from src.cli.command_line import nearest, parse, parse_as
from src.config import REFUSED, TrainerConfig
from src.core.errors import ConfigError
from src.core.skyrl_options import REFUSED_BY_REASON, TAKEN, reason_against, taken_arguments
from src.evaluate.config import EvaluateConfig

BASE = ["tasks_dir=t", "model_name=m"]
TAU = ["env=tau_bench", "model_name=m"]
TAU_OPTIONS = {"test_data", "train_data", "use_native_tool_calling"}
OPTION_FIELDS = chz.chz_fields(TrainerConfig)
VALUES = {  # values of options that do not accept the number 2
    "advantage_estimator": "rloo",
    "loss_reduction": "sequence_mean",
    "kl_estimator": "k3",
    "max_input_length": "20000",
    "dynamic_sampling_min_replace_ratio": "0.5",
    "eval_top_p": "0.5",
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.seed_behaviour(144)
def test_a_name_of_skyrl_sets_our_option(name: str) -> None:
    ours, _, pattern = TAKEN[name].partition("|")[0].partition("=")
    field = OPTION_FIELDS[ours]
    value = VALUES.get(ours, "true" if field.final_type is bool else "2")
    spelled = name.replace("<name>", "airline")
    argument = f"{ours}={pattern.replace('{}', value).replace('<name>', 'airline')}"
    base = [*(TAU if ours in TAU_OPTIONS else BASE), "judge_model=j", "judge_base_url=http://h:1/v1"]
    base += ["dynamic_sampling=replace"] if "dynamic" in name else []
    base += ["taxonomy_feedback=true"] if "TAXONOMY" in name else []
    assert parse([*base, f"+{spelled}={value}"]) == parse([*base, argument])


@pytest.mark.seed_behaviour(16)
def test_the_lists_of_a_script_become_one_option() -> None:
    script = ["data.train_data=['a.parquet','b.parquet']", "retail_val_data='v.parquet'"]
    script += ["data.test_data.retail=r.parquet", "data.test_data.airline=a.parquet"]
    config = parse([*TAU, *script, "test_data=telecom:test"])
    assert config.train_data == ["a.parquet", "b.parquet"]
    files = ["retail_val=v.parquet", "retail=r.parquet", "airline=a.parquet"]
    assert config.test_data == ["telecom:test", *files]


def test_a_script_of_skyrl_is_read_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    script = ["trainer.policy.model.path=m", "trainer.policy.optimizer_config.lr=3e-6", "eval_interval=5"]
    script += [
        "generator.n_samples_per_prompt=5",
        "trainer.epochs=3",
        "generator.sampling_params.temperature=0.9",
    ]
    config = parse(["tasks_dir=t", *script])
    assert (config.model_name, config.learning_rate, config.eval_every) == ("m", 3e-6, 5)
    assert (config.group_size, config.n_epochs, config.temperature) == (5, 3, 0.9)
    [note] = capsys.readouterr().err.splitlines()
    assert note.startswith(
        "note: options of SkyRL are converted to model_name=m learning_rate=3e-6 eval_every=5 "
    )


# Options in scripts and configurations of the seed documents -> our option, or "" for a refused name.
DOCUMENTS = {
    "data.train_data=['a.parquet']": "train_data",
    "data.val_data=['v.parquet']": "test_data",
    "data.retail_val_data=['r.parquet']": "test_data",
    "data.test_data.retail=r.parquet": "test_data",
    "data.test_data.airline=a.parquet": "test_data",
    "trainer.epochs=1": "n_epochs",
    "trainer.eval_interval=1": "eval_every",
    "trainer.eval_before_train=true": "eval_before_train",
    "trainer.train_batch_size=4": "batch_size",
    "trainer.policy_mini_batch_size=2": "",
    "trainer.critic_mini_batch_size=2": "",
    "trainer.eval_batch_size=2": "",
    "trainer.max_prompt_length=2048": "",
    "trainer.dump_eval_results=true": "dump_eval_results",
    "trainer.export_path=exports": "export_path",
    "trainer.strategy=fsdp2": "",
    "trainer.flash_attn=true": "",
    "trainer.target_modules=all-linear": "",
    "trainer.placement.colocate_all=true": "",
    "trainer.critic.fsdp_config.cpu_offload=true": "",
    "trainer.policy.model.path=m": "model_name",
    "trainer.policy.model.lora_rank=32": "lora_rank",
    "trainer.policy.model.lora_alpha=64": "lora_alpha",
    "trainer.policy.model.lora_dropout=0.05": "",
    "generator.use_native_tool_calling=true": "use_native_tool_calling",
    "generator.use_conversation_multi_turn=true": "",
    "generator.custom_chat_template=t": "",
    "generator.gpu_memory_utilization=0.6": "",
    "generator.zero_reward_on_non_stop=false": "zero_reward_on_non_stop",
    "generator.zero_reward_on_length_threshold=true": "zero_reward_on_length_threshold",
    "generator.max_assistant_response_tokens=2048": "max_assistant_response_tokens",
    "generator.sampling_params.top_p=0.95": "",
    "generator.sampling_params.temperature=0.8": "temperature",
    "generator.eval_sampling_params.top_p=0.95": "eval_top_p",
    "generator.n_samples_per_prompt=5": "group_size",
    "generator.step_wise_trajectories=true": "step_wise_trajectories",
    "generator.retokenize_chat_history=true": "",
    "environment.skyrl_gym.max_env_workers=6": "n_parallel_envs",
    "environment.skyrl_gym.tau_bench.use_native_tool_calling=true": "use_native_tool_calling",
    "environment.skyrl_gym.tau_bench.TAXONOMY_FEEDBACK=true": "taxonomy_feedback",
    "max_input_length=16384": "max_input_length",
    "max_generate_length=1024": "max_generate_length",
    "max_sequence_length=17408": "max_sequence_length",
    "enable_thinking=false": "",
    "kl_loss_coef=0.01": "",
    "value_clip=0.1": "",
    "repetition_penalty=1.1": "",
}


@pytest.mark.parametrize("argument", DOCUMENTS)
@pytest.mark.seed_behaviour(107, 108, 137)
def test_every_option_of_the_documents_is_accepted_or_refused(argument: str) -> None:
    ours = DOCUMENTS[argument]
    base = [*(TAU if ours in TAU_OPTIONS else BASE), "judge_model=j", "judge_base_url=http://h:1/v1"]
    base = [word for word in base if ours != "model_name" or not word.startswith("model_name=")]
    if ours:
        value = getattr(parse([*base, argument]), ours)
        expected = argument.partition("=")[2].strip("[']")
        assert expected in str(value).lower() or value == pytest.approx(float(expected))
        return
    with pytest.raises(ConfigError, match=" cannot be honoured: ") as error:
        parse([*base, argument])
    assert "did you mean" not in str(error.value)


def test_an_evaluation_accepts_its_options() -> None:
    config = parse_as(EvaluateConfig, [*BASE, "n_samples_per_prompt=3", "eval_sampling_params.temperature=0"])
    assert (config.n_samples, config.temperature) == (3, 0)
    message = r"trainer\.epochs corresponds to n_epochs, which this program does not have"
    with pytest.raises(ConfigError, match=message):
        parse_as(EvaluateConfig, [*BASE, "trainer.epochs=3"])


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("generator.sampling_params.top_p=0.95", "training assumes samples from the whole distribution"),
        ("trainer.policy.model.lora_dropout=0.05", "the Tinker API has no LoRA dropout; remove it"),
        ("trainer.policy.model.lora.dropout=0.05", "the Tinker API has no LoRA dropout; remove it"),
        ("trainer.target_modules=all-linear", "the adapter covers all linear layers; remove it"),
        ("generator.chat_template.source=name", "the chat template is that of the model's tokenizer"),
        ("trainer.algorithm.kl_loss_coef=0.01", "use kl_penalty_coef and kl_estimator"),
        ("trainer.policy_mini_batch_size=16", "write num_substeps=<train_batch_size"),
        ("trainer.critic.optimizer_config.lr=1e-6", "the Tinker API has no critic"),
        ("trainer.placement.colocate_all=true", "the server places and runs the models"),
        ("generator.gpu_memory_utilization=0.6", "the server places and runs the models"),
        ("trainer.logger=wandb", "write wandb_project=NAME"),
        ("eval_batch_size=2", "all held-out tasks are evaluated"),
        ("data.test_data={retail:a}", "write test_data=NAME=FILE"),
        ("kl_loss_coef=0.01", "use kl_penalty_coef and kl_estimator"),
    ],
)
@pytest.mark.seed_behaviour(144)
def test_an_option_without_a_counterpart_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="cannot be honoured: ") as error:
        parse([*BASE, argument])
    assert reason in str(error.value) and "did you mean" not in str(error.value)


def test_every_reason_belongs_to_a_refused_name() -> None:
    assert not set(TAKEN) & set(REFUSED_BY_REASON)
    for name, reason in REFUSED_BY_REASON.items():
        assert reason_against(name, REFUSED) == reason


@pytest.mark.parametrize(
    "name", ["val_dat", "validation_data", "test_dir", "dev_data", "held_out_data", "valdata"]
)
@pytest.mark.seed_behaviour(16)
def test_held_out_data_is_never_taken_for_training_data(name: str) -> None:
    assert nearest(name, list(OPTION_FIELDS)) not in ("train_data", "tasks_dir")
    with pytest.raises(ConfigError, match="unknown option") as error:
        parse([*BASE, f"{name}=v.parquet"])
    assert "train_data" not in str(error.value) and "tasks_dir" not in str(error.value)


def test_names_of_our_options_pass_unchanged() -> None:
    argv = [f"{name}=2" for name in OPTION_FIELDS]
    assert taken_arguments(argv, OPTION_FIELDS, REFUSED) == (argv, [])
