"""Run sdk_smoke.py against this server with each tested version of the `tinker` SDK.

    python -m scripts.sdk_matrix [venvs=DIR] [url=URL] [VERSION ...]

The program creates a virtual environment per version with uv (in `venvs`, by default a temporary directory)
and runs `sdk_smoke.py` in each of them. If no `url` is given, it first starts a server, whose model has one
layer and random weights. It prints one line per version and, if a version failed, the last lines of the
output of `sdk_smoke.py`. The exit status is 0 if all versions passed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, models, pre_tokenizers

from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model

ROOT = Path(__file__).resolve().parents[1]
# Each of these versions changed the requests that a server receives.
VERSIONS = (
    "0.6.0",
    "0.9.0",
    "0.16.1",
    "0.18.0",
    "0.19.0",
    "0.22.7",
    "0.24.1",
    "0.25.0",
    "0.27.2",
    "0.29.1",
    "0.32.0",
    "0.36.0",
    "0.38.0",
)
TIMEOUT_S = 300


def main(argv: list[str]) -> int:
    if not {"--help", "-h"}.isdisjoint(argv):
        print(__doc__)
        return 0
    options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    versions = [argument for argument in argv if "=" not in argument] or VERSIONS
    unknown = [*(options.keys() - {"venvs", "url"}), *(name for name in versions if not name[:1].isdigit())]
    if unknown:
        print(
            f"sdk_matrix: {', '.join(sorted(unknown))}: neither a version nor one of the options venvs=DIR "
            "and url=URL",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="sdk_matrix-") as scratch:
        venvs = Path(options.get("venvs", f"{scratch}/venvs")).absolute()
        with contextlib.nullcontext(options["url"]) if "url" in options else serving(Path(scratch)) as url:
            passed = [run(version, venvs / version, url) for version in versions]
    print(f"{sum(passed)} of {len(passed)} versions passed")
    return 0 if all(passed) else 1


def run(version: str, venv: Path, url: str) -> bool:
    """Run sdk_smoke.py with one version of the SDK. Print the result and, after a failure, the last lines of
    the output. Return whether the version passed."""
    python = make_venv(version, venv)
    started = time.perf_counter()
    try:
        process = subprocess.run(
            [python, str(ROOT / "scripts" / "sdk_smoke.py"), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        status, output = f"exit {process.returncode}", process.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        status = f"timeout after {TIMEOUT_S} s"
    has_passed = status == "exit 0" and f"tinker {version}" in output
    steps = sum(line.startswith("ok ") for line in output.splitlines())
    verdict = "passed" if has_passed else f"FAILED ({status})"
    print(f"{version:8} {verdict:20} {steps:3} steps {time.perf_counter() - started:6.1f} s", flush=True)
    if not has_passed:
        print("\n".join(f"    {line}" for line in output.splitlines()[-30:]), flush=True)
    return has_passed


def find_uv() -> str:
    """Return the path of uv: the one on PATH, or else the copy that scripts/setup.sh installed."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".cache" / "uv" / "bin"))
    if uv is None:
        raise SystemExit("sdk_matrix: uv is not installed; run scripts/setup.sh")
    return uv


def make_venv(version: str, venv: Path) -> str:
    """Install a version of the SDK in `venv`, which is created if necessary. Return the path of the Python of
    `venv`."""
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    packages = [f"tinker=={version}", "orjson"]  # 0.18.0 imports orjson without declaring it
    subprocess.run([find_uv(), "pip", "install", "--quiet", "--python", python, *packages], check=True)
    return python


def package_index_problem() -> str | None:
    """Return the reason why packages cannot be downloaded, or None. The check resolves a small package
    without the cache and does not install it."""
    command = [find_uv(), "pip", "compile", "--quiet", "--no-deps", "--refresh-package", "iniconfig", "-"]
    result = subprocess.run(command, input="iniconfig", capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr.strip()[-300:]


def serving(directory: Path) -> contextlib.AbstractContextManager[str]:
    """Start the server with a tiny model and log level `warning`."""
    options = {
        "base_model": make_model(directory / "model"),
        "model_alias": "local/tiny",
        "max_lora_rank": 8,
        "max_num_seqs": 4,
    }
    return serve(
        **options, train_tokens_per_batch=1024, checkpoints_dir=directory / "checkpoints", log_level="warning"
    )


@contextlib.contextmanager
def serve(**options: object) -> Iterator[str]:
    """Start a server with these options, yield its URL, and terminate it at the end."""
    command = [
        sys.executable,
        "-m",
        "skyrl_tx_server",
        "port=0",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("skyrl-tx server ready: "):
            raise SystemExit("the server did not start; see its error message above")
        try:
            yield ready.split()[3]
        finally:
            process.terminate()


def make_model(directory: Path) -> Path:
    """Write a Qwen3 with one layer, random weights and a byte-level tokenizer to `directory`."""
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(256,),
    )
    save_model(init_params(config, jax.random.key(0), jnp.float32), config, directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
