from pathlib import Path

import chz
import pytest

from src.cli.command_line import help_text, parse
from src.config import REFUSED, SECTIONS, TrainerConfig, run_name
from src.core.errors import ConfigError
from src.core.options import pairs, sections
from src.learning.options import LearnerOptions

BASE = ["model_name=Qwen/Qwen3-4B", "tasks_dir=./tasks"]
OUR_SERVER = [*BASE, "backend=skyrl-tx", "skyrl_tx_url=http://h:1"]


@pytest.mark.seed_behaviour(115)
def test_the_seeds_options_keep_their_names_and_defaults():
    config = parse(BASE)
    expected = {
        "logs_dir": "/tmp/terminus2-training",
        "backend": "tinker",
        "lora_rank": 32,
        "learning_rate": 5e-4,
        "batch_size": 1,
        "group_size": 8,
        "n_epochs": 1,
        "eval_split": 0.2,
        "loss_fn": "ppo",
        "num_substeps": 1,
        "remove_constant_reward_groups": False,
        "normalize_advantages_by_std": True,
        "kl_penalty_coef": 0,
        "temperature": 0.7,
        "max_tokens": 1024,
        "context_limit": 32000,
        "enable_summarize": True,
        "proactive_summarization_threshold": 8000,
        "environment_type": "auto",
        "n_parallel_envs": 8,
        "save_every": 20,
    }
    absent = (
        "skyrl_tx_url",
        "tinker_base_url",
        "eval_tasks",
        "eval_group_size",
        "max_turns",
        "environment_kwargs",
        "trial_timeout_s",
    )
    expected |= dict.fromkeys([*absent, "wandb_project", "wandb_name"])
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.seed_behaviour(118)
def test_the_command_of_run_sh_is_accepted():
    script = (Path(__file__).resolve().parents[2] / "run.sh").read_text().partition("exec ")[2]
    config = parse([word for word in script.split() if "=" in word])
    assert (config.backend, config.tinker_base_url) == ("tinker", None)
    assert (config.model_name, config.context_limit) == ("deepseek-ai/DeepSeek-V3.1", 32000)


@pytest.mark.seed_behaviour(130)
def test_the_single_task_of_the_documents_is_accepted():
    argv = "backend=skyrl-tx skyrl_tx_url=http://localhost:8000 model_name=Qwen/Qwen3-4B "
    argv += "tasks_dir=./datasets/terminal-bench-2 batch_size=1 group_size=2 n_parallel_envs=2 n_epochs=1 "
    config = parse(f"{argv} environment_type=docker".split())
    assert (config.batch_size, config.group_size, config.n_epochs) == (1, 2, 1)
    assert (config.n_parallel_envs, config.environment_type) == (2, "docker")


@pytest.mark.seed_behaviour(117)
def test_the_recipe_of_the_seeds_is_accepted():
    recipe = "learning_rate=2e-4 batch_size=2 group_size=16 n_parallel_envs=16 max_tokens=2048 "
    recipe += "temperature=0.7 context_limit=128000"
    recipe += " proactive_summarization_threshold=8000 enable_summarize=true n_epochs=2 num_substeps=4"
    recipe += " remove_constant_reward_groups=true normalize_advantages_by_std=true loss_fn=ppo"
    recipe += " environment_type=docker"
    config = parse([*OUR_SERVER, *recipe.split()])
    assert (config.num_substeps, config.remove_constant_reward_groups, config.context_limit) == (
        4,
        True,
        128000,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["group_size=abc"], "group_size=abc: expected int$"),
        (["loss_fn=dpo"], r"expected importance_sampling \| ppo \| cispo \| server:NAME"),
        (["loss_fn=server:dro"], "would also train tokens that were never sampled"),
        (["max_staleness=1", "loss_fn=server:mine"], "bounds the importance ratio of stale tokens"),
        (["skyrl_tx_url=http://h:1"], "skyrl_tx_url needs backend=skyrl-tx"),
        (["backend=skyrl-tx", "skyrl_tx_url=localhost:8000"], "needs skyrl_tx_url=http://host:port"),
        (["max_tokens=32000"], "max_tokens=32000 leaves no room for a prompt"),
        (["context_limit=4000"], "proactive_summarization_threshold=8000 would summarise every turn"),
        (["group_size=1"], "group_size=1: a single trial has no other reward"),
        (["min_group_size=9"], "min_group_size=9 is above group_size=8"),
        (["num_substeps=9"], "num_substeps=9 is more than the 8 trajectories of a step"),
        (["eval_split=1"], "eval_split must be at least 0 and below 1"),
        (["max_failure_rate=-0.1"], "max_failure_rate must lie between 0 and 1, not -0.1"),
        (["learning_rate=0"], "learning_rate must be above 0"),
        (["learning_rate=inf"], "learning_rate must be finite, not inf"),
        (["temperature=inf"], "temperature must be finite, not inf"),
        (["lora_rank=0"], "lora_rank must be at least 1, not 0"),
        (["n_parallel_envs=0"], "n_parallel_envs must be at least 1"),
        (["environment_kwargs=cpus"], "environment_kwargs takes key=value pairs, not 'cpus'"),
        (
            ["loss_fn_config=beta=0.1"],
            "loss_fn=ppo has no setting 'beta'; it takes clip_low_threshold, clip_high_threshold",
        ),
        (["loss_fn=dro"], "loss_fn=dro: expected importance_sampling"),
        (
            ["loss_fn_config=clip_low_threshold=x"],
            "loss_fn_config clip_low_threshold needs a number, not 'x'",
        ),
        (
            ["max_input_length=31000"],
            r"max_input_length=31000 \+ max_tokens=1024 exceed max_sequence_length=32000; "
            "lower max_input_length",
        ),
        (
            ["max_input_length=30720", "max_generate_length=2048"],
            r"max_generate_length=2048 exceed max_sequence_length=32000",
        ),
        (["max_sequence_length=32001"], "max_sequence_length=32001 is above context_limit=32000"),
        (["max_generate_length=32000"], "max_generate_length=32000 leaves no room"),
        (["max_input_length=0"], "max_input_length must be at least 1"),
        (["advantage_estimator=gae"], "advantage_estimator=gae: expected grpo"),
        (
            ["advantage_estimator=rloo", "normalize_advantages_by_std=false"],
            "works only with advantage_estimator=grpo or dr_grpo, not rloo",
        ),
        (["advantage_estimator=reinforce++", "step_wise_trajectories=true"], "exclude each other"),
        (["loss_reduction=token_mean_legacy"], "loss_reduction=token_mean_legacy: expected token_mean"),
        (
            ["dynamic_sampling=filter", "remove_constant_reward_groups=true"],
            "remove remove_constant_reward_groups",
        ),
        (["tis_cap=2"], "tis_cap needs tis=token or tis=sequence"),
        (["tis_sequence_mask_low=0.5"], "need tis_sequence_mask="),
        (["max_groups_in_flight=4"], "max_groups_in_flight needs max_staleness=1"),
        (
            ["max_staleness=1", "batch_size=4", "max_groups_in_flight=3"],
            "max_groups_in_flight=3 is below batch_size=4",
        ),
        (
            ["max_staleness=1", "loss_fn=importance_sampling"],
            "use loss_fn=ppo or cispo instead of importance_sampling, or set allow_unclipped_staleness=true",
        ),
        (
            ["max_staleness=1", "dynamic_sampling=filter"],
            "max_staleness > 0 and dynamic_sampling=filter exclude each other",
        ),
        (
            ["max_staleness=1", "task_sampling=thompson"],
            "rolls out tasks in the order of the schedule; remove task_sampling=thompson",
        ),
        (
            ["stream_groups=true"],
            "excludes loss_reduction=token_mean, which needs the whole batch; use loss_reduction=prompt_mean",
        ),
        (
            ["stream_groups=true", "loss_reduction=prompt_mean", "tis=token"],
            "excludes tis=token, which is applied to the whole batch",
        ),
        (["failed_trial_reward=1"], r"failed_trial_reward=1: expected 0 \| None$"),
        (["a...=3"], "unknown option"),
    ],
)
@pytest.mark.seed_behaviour(84)
def test_unsupported_options_are_refused_with_a_fix(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse([*BASE, *options])
    assert "\n" not in str(error.value)


def test_unclipped_staleness_can_be_allowed():
    options = ["max_staleness=1", "loss_fn=importance_sampling", "allow_unclipped_staleness=true"]
    assert parse([*BASE, *options]).max_staleness == 1


def test_none_may_be_written_in_any_case():
    assert parse([*BASE, "max_turns=none"]).max_turns is None
    assert parse([*BASE, "max_turns=None"]).max_turns is None


def test_lists_are_comma_separated():
    config = parse([*BASE, "eval_tasks=a-*,b-01", "environment_kwargs=cpus=2,network=true"])
    assert config.eval_tasks == ["a-*", "b-01"]
    assert pairs(config.environment_kwargs, option="environment_kwargs") == {"cpus": "2", "network": "true"}


@pytest.mark.parametrize(
    "options",
    [["singleton_advantage=raw"], ["advantage_estimator=reinforce++"]],
    ids=lambda options: options[0],
)
def test_groups_of_one_need_advantages_of_single_trials(options: list[str]):
    assert parse([*BASE, "group_size=1", *options]).group_size == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["group_size=1"], "a single trial has no other reward"),
        (["group_size=1", "advantage_estimator=rloo"], "a single trial has no other reward"),
        (
            ["singleton_advantage=raw", "advantage_estimator=rloo"],
            "has no effect with advantage_estimator=rloo",
        ),
    ],
)
def test_single_trials_without_an_advantage_are_refused(options: list[str], error: str):
    with pytest.raises(ConfigError, match=error):
        parse([*BASE, *options])


def test_loss_fn_config_sets_the_settings_of_the_loss():
    options = LearnerOptions(loss_fn="cispo", loss_fn_config=["clip_low_threshold=0.7"])
    assert options.loss_settings == {"clip_low_threshold": 0.7}


def test_a_run_name_has_tasks_model_main_options_and_date():
    assert run_name(parse(BASE), date="D") == "tasks-Qwen-Qwen3-4B-rank32-lr0.0005-g8-b1-D"
    assert run_name(parse([*BASE, "wandb_name=mine"]), date="D") == "mine"


def test_every_option_is_documented_and_sections_are_options():
    fields = chz.chz_fields(TrainerConfig)
    text = help_text()
    assert all(field._doc for field in fields.values())
    assert all(f"  {name} " in text for name in fields)
    assert set(SECTIONS) == set(sections(TrainerConfig))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.seed_behaviour(75, 80, 84)
def test_options_without_tinker_support_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"^{name} cannot be honoured: .+") as error:
        parse([*BASE, f"{name}=0.1"])
    assert "\n" not in str(error.value)


@pytest.mark.seed_behaviour(141)
def test_skyrls_length_names_and_ours_mean_the_same():
    limits = parse(
        [*BASE, "max_input_length=28672", "max_generate_length=2048", "max_sequence_length=30720"]
    ).length_limits
    assert (limits.max_input_length, limits.max_generate_length, limits.max_sequence_length) == (
        28672,
        2048,
        30720,
    )
    default = parse([*BASE, "max_tokens=512", "context_limit=16000"]).length_limits
    assert (default.max_input_length, default.max_generate_length, default.max_sequence_length) == (
        15999,
        512,
        16000,
    )
    assert (
        default.max_new_tokens(15999) == 1
        and default.max_new_tokens(16000) == 0
        and default.max_new_tokens(100) == 512
    )


def test_normalize_advantages_by_std_selects_the_estimator():
    assert parse(BASE).estimator == "grpo"
    assert parse([*BASE, "normalize_advantages_by_std=false"]).estimator == "dr_grpo"
    assert parse([*BASE, "advantage_estimator=rloo"]).estimator == "rloo"
