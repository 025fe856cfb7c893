"""Tests that each recipe of scripts/recipes/ loads, validates and trains, and that its options have the
values that the seed documents (docs/seed-behaviours.md) state for it.
"""

from __future__ import annotations

import json
import subprocess
from itertools import cycle
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig
from src.envs.registry import open_task_source
from src.envs.service.service_env import Grade
from src.envs.service.toy_retail import ToyRetailEpisode
from src.loop.connection import Dependencies
from src.policy.chat import load_chat
from src.policy.openai_client import ChatReply
from src.records.tracking import project_name
from src.rollouts.judge import MODES
from tests.fakes.backend import BanditBackend
from tests.fakes.run import FakeRun

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "scripts" / "recipes").glob("*.args"))
# Recipe that changes another recipe -> the recipe with which it is tested.
OVERLAYS = {"taxonomy": "retail_4b_grpo_lora", "small_memory": "retail_4b_grpo_lora"}
OVERLAYS |= {"generalize": "tau_bench_config", "retail": "retail_4b_grpo_lora"}
SERVER = ["backend=skyrl-tx", "skyrl_tx_url=http://h:1"]
JUDGE = ["judge_model=m", "judge_base_url=http://h:1/v1"]

QWEN_3B, QWEN_7B = "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
QWEN_4B, QWEN_8B, LLAMA = "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"
RL, JUDGED = "tau_bench_rl", "_with_taxonomy_feedback"
# CONFIG has the values of the configuration file that the seed documents (docs/seed-behaviours.md) describe.
# SCRIPT has those of the training scripts that override this file. Their learning rates for full fine-tuning
# (5e-7 and 3e-7) are multiplied by ten here.
CONFIG = {"kl_penalty_coef": 0.01, "learning_rate": 5e-6, "lr_warmup_steps": 50, "temperature": 0.8}
CONFIG |= {"weight_decay": 0.05, "grad_clip_norm": 0.5, "batch_size": 64, "num_substeps": 64 // 16}
CONFIG |= {"group_size": 5, "eval_every": 3, "test_data": ["retail:test", "airline:test"]}
SCRIPT = CONFIG | {"kl_penalty_coef": 0.02, "learning_rate": 3e-6, "lr_warmup_steps": 200}
SCRIPT |= {"temperature": 0.9}
FILTERED = {"zero_reward_on_length_threshold": True, "max_assistant_response_tokens": 2048}
LORA_4B = {"lora_rank": 32, "lora_alpha": 64, "eval_every": 5, **FILTERED}
LORA_8B = {"lora_rank": 64, "lora_alpha": 128, "eval_every": 5, "eval_before_train": True}
# Preset -> model, wandb project and numbers.
PRESETS = {
    "multi_domain": (QWEN_3B, RL, SCRIPT),
    "multi_domain_7b": (QWEN_7B, f"{RL}_7b", CONFIG),
    "multi_domain_7b_optimized": (QWEN_7B, f"{RL}_7b", SCRIPT),
    "retail_3b_grpo": (QWEN_3B, RL, {"lora_alpha": None, "eval_every": 5, "learning_rate": 3e-5}),
    "retail_3b_grpo_repetition_fix": (QWEN_3B, RL, FILTERED),
    "retail_3b_grpo_taxonomy": (QWEN_3B, f"{RL}{JUDGED}", {"taxonomy_feedback": True}),
    "retail_7b_grpo": (QWEN_7B, f"{RL}_7b", {"lora_alpha": None, "eval_every": 5, "learning_rate": 2e-6}),
    "retail_7b_grpo_taxonomy": (QWEN_7B, f"{RL}_7b{JUDGED}", {"taxonomy_feedback": True}),
    "retail_8b_grpo_taxonomy": (QWEN_8B, f"{RL}_8b{JUDGED}", {"eval_before_train": True, "lora_alpha": None}),
    "tau_bench": (QWEN_3B, RL, SCRIPT),
    "tau_bench_7b": (QWEN_7B, f"{RL}_7b", SCRIPT),
    "tau_bench_llama": (LLAMA, f"{RL}_llama", SCRIPT),
    "tau_bench_config": (QWEN_3B, RL, CONFIG),
    "tau_bench_llama_config": (LLAMA, f"{RL}_llama", CONFIG),
    "retail_4b_grpo_taxonomy": (
        QWEN_4B,
        f"{RL}_4b{JUDGED}",
        {"batch_size": 4, "num_substeps": 4 // 2, "n_parallel_envs": 6, "lora_alpha": None},
    ),
    "retail_4b_grpo_lora": (QWEN_4B, f"{RL}_4b", LORA_4B),
    "retail_4b_grpo_lora_taxonomy": (QWEN_4B, f"{RL}_4b{JUDGED}", LORA_4B),
    "retail_8b_grpo_lora": (QWEN_8B, f"{RL}_8b", LORA_8B),
    "retail_8b_grpo_lora_taxonomy": (QWEN_8B, f"{RL}_8b{JUDGED}", LORA_8B),
}


def run_recipe(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "recipe.sh", *words], capture_output=True, text=True, check=False
    )


def arguments(*words: str) -> list[str]:
    printed = run_recipe("--print", *words)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


def recipe(*words: str) -> TrainerConfig:
    return parse([*SERVER, *arguments(*words)])


@pytest.mark.seed_behaviour(100)
def test_every_recipe_is_a_preset_or_builds_on_one():
    assert sorted([*PRESETS, *OVERLAYS]) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.seed_behaviour(8, 40, 74, 93)
def test_every_recipe_loads_and_validates(name: str):
    config = recipe(*([OVERLAYS[name]] if name in OVERLAYS else []), name, *JUDGE)
    assert config.env == "tau_bench" and config.use_native_tool_calling
    assert config.zero_reward_on_non_stop is False and config.learning_rate >= 1e-6
    assert config.loss_settings == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.seed_behaviour(18, 72, 81, 85, 93, 105, 111)
def test_a_recipe_has_the_numbers_of_its_preset(name: str):
    model, project, numbers = PRESETS[name]
    config = recipe(f"training/run_{name}.sh", *JUDGE)
    assert config.model_name == model and config.wandb_project is not None
    assert project_name(config.wandb_project, is_judged=config.taxonomy_feedback) == project
    assert {option: getattr(config, option) for option in numbers} == numbers
    assert config.taxonomy_feedback == project.endswith(JUDGED) == name.endswith("taxonomy")


class Judge:
    model = "judge-1"

    async def reply(self, messages, *, temperature, seed):
        return ChatReply(text=json.dumps(dict.fromkeys(MODES, False)))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.seed_behaviour(93)
async def test_a_preset_trains_two_steps_on_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    rewards = cycle([1.0, 0.0])  # Equal rewards would give no gradient.

    async def grade(episode: ToyRetailEpisode) -> Grade:
        return Grade(reward=next(rewards), metrics={})

    monkeypatch.setattr(ToyRetailEpisode, "grade", grade)
    monkeypatch.setattr("src.loop.run.open_endpoint", lambda base_url, model: Judge())
    chat, backend = load_chat(str(ROOT / "datasets" / "toy_retail" / "model")), BanditBackend()
    run = FakeRun(
        tmp_path / "run", lambda config: Dependencies(source=open_task_source(config, chat), backend=backend)
    )
    small = ["environment_kwargs=domain=toy_retail", "test_data=held=toy_retail:test", "wandb_project=none"]
    small += ["context_limit=2048", "max_input_length=none", "max_tokens=4", "max_turns=2", "max_steps=2"]
    small += ["batch_size=2", "group_size=2", "eval_group_size=1", "eval_before_train=false", "eval_every=0"]
    mixture = ["domain_mixture=toy_retail=1"] if name.startswith("multi_domain") else []
    options = [line for line in arguments(name) if not line.startswith("model_name=")]
    await run.go(*options, *small, "num_substeps=2", *mixture, *JUDGE)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert "test-held/success_rate" in lines[-1]
    assert ("reward/judge_bonus_mean" in lines[-1]) == name.endswith("taxonomy")


@pytest.mark.seed_behaviour(82, 83)
def test_later_recipes_and_given_options_take_precedence():
    config = recipe("retail_4b_grpo_lora", "taxonomy", "small_memory", "seed=7", "batch_size=2", *JUDGE)
    assert (
        config.n_parallel_envs,
        config.batch_size,
        config.num_substeps,
        config.max_input_length,
        config.seed,
    ) == (6, 2, 2, 8192, 7)
    assert config.taxonomy_feedback and config.model_name == QWEN_4B


@pytest.mark.seed_behaviour(101, 110)
def test_options_of_skyrl_replace_those_of_a_recipe():
    short = recipe("run_tau_bench.sh", "trainer.epochs=1", "trainer.eval_interval=1")
    assert (short.n_epochs, short.eval_every) == (1, 1)
    adapter = ["trainer.policy.model.lora_rank=64", "trainer.policy.model.lora_alpha=128"]
    custom = recipe("tau_bench", *adapter)
    assert (custom.lora_rank, custom.lora_alpha) == (64, 128)


def test_an_unusable_recipe_gives_a_one_line_error():
    with pytest.raises(ValueError, match="taxonomy_feedback needs a judge"):
        recipe("retail_3b_grpo", "taxonomy")
    unknown = run_recipe("retail_5b")
    assert unknown.returncode == 2 and unknown.stderr.startswith(
        "recipe: unknown recipe retail_5b; available recipes: generalize"
    )
