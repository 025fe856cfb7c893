"""The recipes of tinker-cookbook that the check runs, with their options and expected metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

Metrics = list[dict[str, float]]
Expectation = Callable[[Metrics], tuple[str, bool]]
"""Takes the lines of metrics.jsonl. Returns a text with the measured figure and whether it is as expected."""

MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # the cookbook lists this model
RENDERER = "qwen3_instruct"  # the renderer of this model, whose answers contain no thinking
REWARD, NLL, KL = "env/all/reward/total", "train_mean_nll", "optim/kl_sample_train_v1"
KL_LIMIT = 2e-4
# An option for the recipes that have loss_fn. The server rejects the default, stable_reinforce, because the
# formula of this loss is not public.
ON_POLICY = "loss_fn=importance_sampling"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    module: str  # name of the module in the package tinker_cookbook.recipes
    options: str
    expectations: tuple[Expectation, ...]
    # Whether the recipe is killed after a checkpoint and run again with behavior_if_log_dir_exists=resume.
    resumed: bool = False
    teacher: str | None = None  # the recipe whose last sampler checkpoint is the teacher


def rises(key: str) -> Expectation:
    return _moves(key, lambda first, last: last > first)


def falls(key: str) -> Expectation:
    return _moves(key, lambda first, last: last < first)


def at_most(key: str, limit: float) -> Expectation:
    """Require that the largest absolute value of `key` is at most `limit`."""

    def check(metrics: Metrics) -> tuple[str, bool]:
        values = [abs(value) for value in series(metrics, key)]
        worst = math.nan if not values or any(map(math.isnan, values)) else max(values)
        return f"{_short(key)} <= {worst:.1e}", worst <= limit

    return check


def every_step(metrics: Metrics) -> tuple[str, bool]:
    """Require of a killed and resumed run that step 0 occurs once and that no step is missing. Steps after
    the checkpoint can occur twice.
    """
    steps = [int(line["step"]) for line in metrics if NLL in line]
    return f"steps {' '.join(map(str, steps))}", steps.count(0) == 1 and sorted(set(steps)) == list(
        range(max(steps) + 1)
    )


def series(metrics: Metrics, key: str) -> list[float]:
    return [line[key] for line in metrics if key in line]


def _moves(key: str, is_expected: Callable[[float, float], bool]) -> Expectation:
    """Compare the mean of `key` over the first quarter of the steps with its mean over the last quarter. The
    values of single steps are noisy, because the batches are small."""

    def check(metrics: Metrics) -> tuple[str, bool]:
        values = series(metrics, key)
        if len(values) < 2:
            return f"{_short(key)}: {len(values)} steps", False
        quarter = max(1, len(values) // 4)
        first, last = statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])
        return f"{_short(key)} {first:.3f} -> {last:.3f}", is_expected(first, last)

    return check


def _short(key: str) -> str:
    return key.removeprefix("env/all/").removeprefix("optim/")


ARITHMETIC = (
    f"env=arithmetic groups_per_batch=24 group_size=8 max_tokens=5 learning_rate=1e-3 {ON_POLICY} "
    "max_steps=16 eval_every=0"
)

RECIPES = (
    Recipe(
        name="math_rl",
        module="math_rl.train",
        options=ARITHMETIC,
        expectations=(rises(REWARD), at_most(KL, KL_LIMIT)),
    ),
    Recipe(
        name="math_rl_async",
        module="math_rl.train",
        options=f"{ARITHMETIC} max_steps_off_policy=2",
        expectations=(rises(REWARD),),
    ),
    Recipe(
        name="rl_loop",
        module="rl_loop",
        options=f"batch_size=16 group_size=8 max_tokens=12 learning_rate=5e-4 {ON_POLICY} max_steps=10 "
        "save_every=4",
        expectations=(rises("reward/total"),),
    ),
    Recipe(
        name="sl_loop",
        module="sl_loop",
        options="batch_size=16 learning_rate=1e-3 max_steps=12 save_every=5",
        expectations=(falls(NLL),),
    ),
    Recipe(
        name="chat_sl",
        module="chat_sl.train",
        options="batch_size=16 learning_rate=1e-3 max_steps=8 save_every=2 eval_every=4",
        resumed=True,
        expectations=(every_step, falls(NLL)),
    ),
    Recipe(
        name="guess_number",
        module="multiplayer_rl.guess_number.train",
        options=f"renderer_name={RENDERER} batch_size=2 group_size=4 max_tokens=8 learning_rate=3e-4 "
        "max_steps=3 eval_every=0",
        expectations=(at_most(KL, KL_LIMIT),),
    ),
    Recipe(
        name="shorter",
        module="preference.shorter.train",
        options=f"renderer_name={RENDERER} batch_size=8 group_size=8 max_tokens=24 learning_rate=1e-3 "
        "max_steps=8 eval_every=0",
        expectations=(falls("env/all/ac_tokens_per_turn"), at_most(KL, KL_LIMIT)),
    ),
    Recipe(
        name="dpo",
        module="preference.dpo.train",
        options=f"renderer_name={RENDERER} dataset=hhh batch_size=16 learning_rate=3e-4 max_steps=10",
        expectations=(falls("dpo_loss"), rises("accuracy")),
    ),
    Recipe(
        name="on_policy_distillation",
        module="distillation.on_policy_distillation",
        options=f"renderer_name={RENDERER} dataset=deepmath groups_per_batch=16 group_size=4 max_tokens=5 "
        "learning_rate=1e-3 lora_rank=32 max_steps=8 eval_every=0",
        teacher="math_rl",
        expectations=(falls("teacher_kl"), at_most(KL, KL_LIMIT)),
    ),
    Recipe(
        name="rl_numerics_check",
        module="rl_numerics_check.train",
        options="groups_per_batch=4 group_size=4 max_tokens=48 max_steps=3 max_trajectory_tokens=3000"
        " task.num_pages_min=1 task.num_pages_max=2 task.page_chars=120",
        expectations=(at_most(KL, KL_LIMIT),),
    ),
)
