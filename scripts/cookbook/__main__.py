"""Run recipes of the unmodified tinker-cookbook 0.6.1 with this server.

    python -m scripts.cookbook [key=value ...] [RECIPE ...]

The program writes data sets and a small Qwen3 to the directory `work`, and later runs with this directory use
them again. It starts a server that serves the model under a name that the cookbook knows. Then it runs the
command line of each recipe, or of each named recipe, in an environment with torch. It prints the result and
the command of each recipe. The exit status is 0 if the process of each recipe ended with 0 and the figures of
each recipe have the expected values. docs/cookbook.md lists the results.

    work=DIR     model, data, logs (default: a temporary directory)
    venv=DIR     environment of the cookbook; created with uv if it does not exist (default: work/venv)
    torch=FILE   a torch wheel for Python 3.11 (default: torch from PyPI)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.cookbook.material import build_model, write_data_sets
from scripts.cookbook.recipes import MODEL, RECIPES, Recipe
from scripts.sdk_matrix import find_uv, serve

# The packages of COOKBOOK are installed without their dependencies, because their requirements cannot be
# satisfied together. torch and the packages of PACKAGES are installed instead of these dependencies.
COOKBOOK = ("tinker-cookbook==0.6.1", "tml-renderers==0.2.1")
PACKAGES = (
    *(
        "tinker==0.38.0",
        "transformers>=4.57.6",
        "aiohttp",
        "anyio",
        "blobfile",
        "chz",
        "cloudpickle",
        "datasets",
        "huggingface-hub",
        "pillow",
    ),
    *(
        "pydantic",
        "pyrage",
        "rich",
        "safetensors",
        "termcolor",
        "tiktoken",
        "tqdm",
        "sympy",
        "pylatexenc",
        "math-verify",
    ),
)
TIMEOUT_S = 1200


def main(argv: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    names = [argument for argument in argv if "=" not in argument] or [recipe.name for recipe in RECIPES]
    if unknown := [
        *(options.keys() - {"work", "venv", "torch"}),
        *(set(names) - {recipe.name for recipe in RECIPES}),
    ]:
        print(
            f"cookbook: unknown {', '.join(sorted(unknown))}; options: work, venv, torch; "
            f"recipes: {', '.join(recipe.name for recipe in RECIPES)}",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="cookbook-") as scratch:
        work = Path(options.get("work", scratch)).absolute()
        python = make_venv(
            Path(options.get("venv", work / "venv")).absolute(), options.get("torch", "torch>=2.10")
        )
        if not (work / MODEL / "model.safetensors").exists():
            write_data_sets(work)
            build_model(work / MODEL)
        server = {
            "base_model": work / MODEL,
            "model_alias": MODEL,
            "checkpoints_dir": work / "checkpoints",
            "log_level": "warning",
        }
        with serve(**server) as url:
            offline = {
                name: "1" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
            }
            client = {
                "TINKER_BASE_URL": url,
                "TINKER_API_KEY": "tml-dummy",
                "TINKER_TELEMETRY": "0",
                "HF_HOME": str(work / "cache"),
            }
            passed = [
                check(recipe, python, work, os.environ | offline | client)
                for recipe in RECIPES
                if recipe.name in names
            ]
    print(f"{sum(passed)} of {len(passed)} recipes passed")
    return 0 if all(passed) else 1


def make_venv(venv: Path, torch: str) -> str:
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([find_uv(), "venv", "--quiet", "--python", "3.11", str(venv)], check=True)
        install = [find_uv(), "pip", "install", "--quiet", "--python", python]
        subprocess.run([*install, torch, *PACKAGES], check=True)
        subprocess.run([*install, "--no-deps", *COOKBOOK], check=True)
    return python


def check(recipe: Recipe, python: str, work: Path, environment: Mapping[str, str]) -> bool:
    """Run a recipe. Print its result and command and, if its exit status is not 0, the end of its output.
    Return whether the recipe passed."""
    log = work / "logs" / recipe.name
    shutil.rmtree(log, ignore_errors=True)
    log.parent.mkdir(exist_ok=True)
    options = [f"model_name={MODEL}", f"log_path={log}", *options_of(recipe, work / "logs")]
    command = [python, "-m", f"tinker_cookbook.recipes.{recipe.module}", *options]
    began = time.perf_counter()
    with log.with_suffix(".out").open("w", encoding="utf-8") as output:
        streams = {
            "cwd": work,
            "env": environment,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        if recipe.resumed and kill_once_saved(subprocess.Popen(command, **streams), log):
            command.append("behavior_if_log_dir_exists=resume")
        status = subprocess.run(command, **streams, timeout=TIMEOUT_S).returncode
    checked = [expectation(lines(log / "metrics.jsonl")) for expectation in recipe.expectations]
    passed = status == 0 and all(is_met for _, is_met in checked)
    figures = ", ".join(text if is_met else f"{text} (unexpected)" for text, is_met in checked)
    verdict, seconds = "passed" if passed else "FAILED", time.perf_counter() - began
    print(f"{recipe.name:24} {verdict} exit {status:3} {seconds:6.0f} s  {figures}")
    print(f"{'':24} python {shlex.join(command[1:])}", flush=True)
    if status != 0:
        print(
            "\n".join(
                f"    {line}"
                for line in log.with_suffix(".out").read_text(encoding="utf-8").splitlines()[-30:]
            ),
            flush=True,
        )
    return passed


def options_of(recipe: Recipe, logs: Path) -> list[str]:
    """Return the options of a recipe, with the last checkpoint of its teacher if the recipe has a teacher."""
    if recipe.teacher is None:
        return recipe.options.split()
    saved = lines(logs / recipe.teacher / "checkpoints.jsonl")
    if not saved:
        raise SystemExit(
            f"cookbook: {recipe.name} needs a checkpoint of {recipe.teacher}; "
            f"run {recipe.teacher} with the same work=DIR first"
        )
    return [
        *recipe.options.split(),
        f"teacher_model={MODEL}",
        f"teacher_checkpoint={saved[-1]['sampler_path']}",
    ]


def kill_once_saved(process: subprocess.Popen[str], log: Path) -> bool:
    """Kill the process as soon as checkpoints.jsonl lists a checkpoint. Return False if the process ended by
    itself before it was killed."""
    while process.poll() is None and not lines(log / "checkpoints.jsonl"):
        time.sleep(0.05)
    process.kill()
    return process.wait() == -signal.SIGKILL


def lines(path: Path) -> list[dict]:
    """Read the complete lines of a file that another process may still write."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if path.exists()
        else []
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
