"""The unmodified tinker-cookbook 0.6.1 against this server: python -m scripts.cookbook [key=value ...] [RECIPE ...]

Builds a small Qwen3 and small data sets below `work` (kept and used again), starts a server on it and runs each recipe with the
cookbook's own command line in an environment with torch. One line per recipe; exit status 0 when all exit with 0 and the figures hold.

    venv=DIR     environment of the cookbook; made with uv when it is not there (default: below work)
    torch=FILE   a torch wheel for that environment's Python (default: torch from PyPI)
    python=3.11  the Python of a new environment
    work=DIR     model, data, logs (default: a temporary directory)
    steps=N      warm start of the model (default 260)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.cookbook.material import build_model, write_data_sets

ROOT = Path(__file__).resolve().parents[2]
MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # a name the cookbook's registry knows; the weights are ours
TIMEOUT_S = 900
OPTIONS = {"venv", "torch", "python", "work", "steps"}
PACKAGES = ("tinker==0.38.0", "transformers>=4.57.6", "aiohttp", "anyio", "blobfile", "chz", "cloudpickle", "datasets", "huggingface-hub")
PACKAGES += ("pillow", "pydantic", "pyrage", "rich", "safetensors", "termcolor", "tiktoken", "tqdm", "sympy", "pylatexenc", "math-verify")
KL_LIMIT = 2e-4

type Rows = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A module of the cookbook, its command line, and what its metrics.jsonl has to show."""

    module: str
    arguments: str
    figure: str  # the metric that is printed, first and last
    holds: Callable[[list[float]], bool] = bool
    log: str = ""  # whose log directory; default: the recipe's own


def rises(values: list[float]) -> bool:
    """The mean of the last quarter is above that of the first."""
    quarter = max(1, len(values) // 4)
    return sum(values[-quarter:]) > sum(values[:quarter])


def falls(values: list[float]) -> bool:
    return rises([-value for value in values])


def small(values: list[float]) -> bool:
    return bool(values) and max(abs(value) for value in values) <= KL_LIMIT


REWARD = "env/all/reward/total"
ARITHMETIC = (
    "env=arithmetic groups_per_batch=16 group_size=8 max_tokens=5 learning_rate=1e-3 loss_fn=importance_sampling "
    "max_steps=8 eval_every=0 save_every=6"
)
CHAT = "dataset=no_robots batch_size=16 learning_rate=5e-4 lora_rank=16 save_every=3 eval_every=3"
RECIPES = {
    "math_rl": Recipe(module="math_rl.train", arguments=ARITHMETIC, figure=REWARD, holds=rises),
    "math_rl_async": Recipe(module="math_rl.train", arguments=f"{ARITHMETIC} max_steps_off_policy=2", figure=REWARD, holds=rises),
    "rl_loop": Recipe(
        module="rl_loop",
        arguments="batch_size=8 group_size=8 max_tokens=16 max_steps=4 learning_rate=1e-3 loss_fn=importance_sampling",
        figure="reward/total",
        holds=any,  # a reward that is always 0 never trains
    ),
    "sl_loop": Recipe(module="sl_loop", arguments="batch_size=16 max_steps=8 learning_rate=1e-3", figure="train_mean_nll", holds=falls),
    "chat_sl": Recipe(module="chat_sl.train", arguments=f"{CHAT} max_steps=6", figure="train_mean_nll", holds=falls),
    "chat_sl_resume": Recipe(
        module="chat_sl.train",
        arguments=f"{CHAT} max_steps=10 behavior_if_log_dir_exists=resume",
        figure="train_mean_nll",
        holds=lambda values: len(values) == 10 and falls(values),
        log="chat_sl",
    ),
    "guess_number": Recipe(
        module="multiplayer_rl.guess_number.train",
        arguments="renderer_name=qwen3_instruct batch_size=8 group_size=4 max_tokens=12 learning_rate=1e-3 max_steps=3 eval_every=0",
        figure=REWARD,
    ),
    "shorter": Recipe(
        module="preference.shorter.train",
        arguments="renderer_name=qwen3_instruct batch_size=8 group_size=4 max_tokens=24 learning_rate=1e-3 max_steps=4 eval_every=0",
        figure=REWARD,
    ),
    "dpo": Recipe(
        module="preference.dpo.train",
        arguments="renderer_name=qwen3_instruct dataset=hhh batch_size=16 learning_rate=1e-3 max_steps=6",
        figure="dpo_loss",
        holds=falls,
    ),
    "distillation": Recipe(
        module="distillation.on_policy_distillation",
        arguments=f"teacher_model={MODEL} dataset=deepmath groups_per_batch=8 group_size=4 max_tokens=16 lora_rank=16 learning_rate=1e-3 "
        "max_steps=4 eval_every=0 save_every=0",
        figure="teacher_kl",
    ),
    "rl_numerics_check": Recipe(
        module="rl_numerics_check.train",
        arguments="group_size=4 groups_per_batch=4 max_tokens=64 max_trajectory_tokens=3000 max_steps=3 learning_rate=1e-3 "
        "task.num_pages_min=3 task.num_pages_max=4 task.page_chars=200",
        figure="optim/kl_sample_train_v1",
        holds=small,
    ),
}


def main(argv: Sequence[str]) -> int:
    options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    names = [argument for argument in argv if "=" not in argument] or list(RECIPES)
    unknown = [*(options.keys() - OPTIONS), *(name for name in names if name not in RECIPES)]
    if unknown:
        print(
            f"cookbook: unknown {', '.join(unknown)}; options: {', '.join(sorted(OPTIONS))}; recipes: {', '.join(RECIPES)}", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="cookbook-") as scratch:
        work = Path(options.get("work", scratch)).absolute()
        python = make_venv(
            Path(options.get("venv", work / "venv")).absolute(), options.get("python", "3.11"), options.get("torch", "torch>=2.10")
        )
        if not (work / MODEL / "model.safetensors").exists():
            write_data_sets(work)
            build_model(work / MODEL, steps=int(options.get("steps", 260)))
        with serving(work) as url:
            passed = [run(name, python, work, url) for name in names]
    print(f"{sum(passed)} of {len(passed)} recipes passed")
    return 0 if all(passed) else 1


def run(name: str, python: str, work: Path, url: str) -> bool:
    """One recipe's line; the end of what it printed when it failed."""
    recipe = RECIPES[name]
    log = work / "logs" / (recipe.log or name)
    resume = recipe.log != ""
    clear = [] if resume or "_loop" in recipe.module else ["behavior_if_log_dir_exists=delete"]
    command = [
        python,
        "-m",
        f"tinker_cookbook.recipes.{recipe.module}",
        f"model_name={MODEL}",
        f"log_path={log}",
        *recipe.arguments.split(),
        *clear,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "cache")}
    service = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-dummy", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    printed = work / f"{name}.log"
    with printed.open("w") as output:
        try:
            done = subprocess.run(
                command,
                cwd=work,
                env=os.environ | offline | service,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
            status = str(done.returncode)
        except subprocess.TimeoutExpired:
            status = f"no end after {TIMEOUT_S} s"
    values = metric(log / "metrics.jsonl", recipe.figure)
    right = status == "0" and recipe.holds(values)
    figures = f"{recipe.figure} {values[0]:.4g} -> {values[-1]:.4g} in {len(values)} steps" if values else f"no {recipe.figure}"
    print(f"{name:18} {'passed' if right else 'FAILED':7} exit {status:4} {time.perf_counter() - began:6.1f} s  {figures}", flush=True)
    if not right:
        print("\n".join(f"    {line}" for line in printed.read_text().splitlines()[-30:]), flush=True)
    return right


def metric(path: Path, name: str) -> list[float]:
    """The values of one metric in the order of its steps."""
    rows: Rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row[name] for row in rows if name in row]


def make_venv(venv: Path, version: str, torch: str) -> str:
    """An environment with the cookbook, as it was released; tml-renderers is imported for models that are not ours."""
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        subprocess.run(["uv", "venv", "--quiet", "--python", version, str(venv)], check=True)
        install = ["uv", "pip", "install", "--quiet", "--python", python]
        subprocess.run([*install, torch, *PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", "tinker-cookbook==0.6.1", "tml-renderers==0.2.1"], check=True)
    return python


@contextlib.contextmanager
def serving(work: Path) -> Iterator[str]:
    """The server on the small model, with its log beside the recipes'."""
    options = {"base_model": work / MODEL, "model_alias": MODEL, "port": 0, "checkpoints_dir": work / "checkpoints"}
    command = [sys.executable, "-m", "skyrl_tx_server", *(f"{name}={value}" for name, value in options.items())]
    with (
        (work / "server.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("skyrl-tx server ready: "):
            raise SystemExit(f"cookbook: the server did not start; see {work / 'server.log'}")
        try:
            yield ready.split()[3]
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
