"""Every recipe of scripts/recipes/ loads, validates, and has the values of the preset of that name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "scripts" / "recipes").glob("*.args"))
SERVER = ["backend=skyrl-tx", "skyrl_tx_url=http://h:1"]
JUDGE = ["judge_model=m", "judge_base_url=http://h:1/v1"]


def said(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "recipe.sh", *words], capture_output=True, text=True, check=False
    )


def recipe(*words: str) -> TrainerConfig:
    printed = said("--print", *words)
    assert printed.returncode == 0, printed.stderr
    return parse([*SERVER, *printed.stdout.splitlines()])


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_validates(name: str):
    config = recipe(
        *(["retail_4b_lora"] if name in ("retail", "small_memory", "taxonomy") else []), name, *JUDGE
    )
    assert config.env == "tau_bench" and config.use_native_tool_calling
    assert config.zero_reward_on_non_stop is False and config.learning_rate >= 1e-6
    assert config.loss_settings == {
        "clip_low_threshold": 0.9,
        "clip_high_threshold": 1.1,
    }


def test_there_is_a_recipe_for_every_preset_of_the_seeds():
    assert {
        "retail_3b",
        "retail_4b_lora",
        "retail_7b",
        "retail_8b_lora",
        "multi_domain",
        "taxonomy",
        "small_memory",
    } <= set(NAMES)


def test_the_numbers_are_the_seeds():
    small = recipe("retail_4b_lora")
    assert (small.lora_rank, small.learning_rate, small.batch_size, small.num_substeps, small.group_size) == (
        32,
        5e-6,
        32,
        2,
        3,
    )
    assert (small.max_turns, small.max_input_length, small.max_tokens, small.kl_penalty_coef) == (
        15,
        16384,
        512,
        0.01,
    )
    assert (small.zero_reward_on_length_threshold, small.max_assistant_response_tokens) == (True, 2048)
    assert (small.weight_decay, small.grad_clip_norm, small.lr_warmup_steps) == (0.01, 1.0, 100)
    large = recipe("retail_8b_lora")
    assert (large.model_name, large.lora_rank, large.batch_size, large.eval_before_train) == (
        "Qwen/Qwen3-8B",
        64,
        64,
        True,
    )
    many = recipe("multi_domain")
    assert (many.kl_penalty_coef, many.group_size, many.temperature, many.domain_shares) == (
        *(0.02, 5, 0.9),
        {"telecom": 0.75, "toy_retail": 0.25},
    )
    assert many.test_data == ["retail:test", "airline:test"] and many.eval_every == 3


def test_later_recipes_and_given_options_take_precedence():
    config = recipe("retail_4b_lora", "taxonomy", "small_memory", "seed=7", "batch_size=2", *JUDGE)
    assert (
        config.n_parallel_envs,
        config.batch_size,
        config.num_substeps,
        config.max_input_length,
        config.seed,
    ) == (6, 2, 2, 8192, 7)
    assert config.taxonomy_feedback and config.model_name == "Qwen/Qwen3-4B-Instruct-2507"


def test_a_recipe_that_cannot_be_used_is_one_line():
    with pytest.raises(ValueError, match="taxonomy_feedback needs a judge"):
        recipe("retail_3b", "taxonomy")
    unknown = said("retail_5b")
    assert unknown.returncode == 2 and unknown.stderr.startswith(
        "recipe: there is no recipe retail_5b; there are: multi_domain"
    )
