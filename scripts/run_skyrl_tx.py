"""`./run_skyrl_tx.sh`: train on our own server, starting one when none answers.

Without `model_name` it is the quick start of a kind of environment, with a small model of ours and an
embedded server on a free port: terminal tasks (datasets/quickstart) or, with `env=tau_bench`, a shop's
customers (datasets/toy_retail). With `model_name` it is the full recipe. Options given on the command line
win over the recipe's. A server started here is stopped when training ends, and dies with this process even if
that is killed. It takes a random key of its own, which is in the file `api_key` beside its log.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx
from dotenv import load_dotenv

from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.envs.registry import check_environment
from src.records.private_folder import make_private, write_private

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "datasets" / "quickstart"
START_TIMEOUT_S = 1800.0
KEY_FILE = "api_key"  # of an embedded server, beside its log
PR_SET_PDEATHSIG = 1

QUICKSTART_OPTIONS = {
    "logs_dir": "./runs",
    "lora_rank": "16",
    "learning_rate": "1e-3",
    "batch_size": "8",
    "group_size": "8",
    "eval_group_size": "8",
    "n_epochs": "100",
    "max_steps": "12",
    "eval_every": "6",
    "n_parallel_envs": "16",
    "temperature": "1.0",
    "max_tokens": "160",
    "context_limit": "2048",
    "loss_fn": "importance_sampling",
    "trial_timeout_s": "120",
    "save_every": "100",
}
QUICKSTART_SERVER = (
    "max_lora_rank=16",
    "max_num_seqs=32",
    "max_context_length=2048",
    "train_tokens_per_batch=2048",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickStart:
    """One kind of environment that can be learnt here in minutes."""

    folder: Path  # its model is model/
    says: str
    options: dict[str, str]


QUICKSTARTS = {
    "harbor": QuickStart(
        folder=QUICKSTART,
        says="a small model learns terminal tasks by GRPO on this machine; about six minutes on two CPU "
        "cores",
        options={
            "model_name": "local/quickstart",
            "tasks_dir": str(QUICKSTART / "train"),
            "eval_tasks": str(QUICKSTART / "heldout"),
            "environment_type": "sandbox",
            "max_turns": "5",
            "enable_summarize": "false",
        },
    ),
    "tau_bench": QuickStart(
        folder=ROOT / "datasets" / "toy_retail",
        says="a small model learns to serve a shop's customers by GRPO on this machine; three to six "
        "minutes on two CPU cores",
        options={
            "model_name": "local/toy-retail",
            "use_native_tool_calling": "true",
            "max_turns": "16",
            "max_steps": "18",
            "n_parallel_envs": "32",
        },
    ),
}
RECIPE_OPTIONS = {
    "learning_rate": "2e-4",
    "batch_size": "2",
    "group_size": "16",
    "n_parallel_envs": "16",
    "max_tokens": "2048",
    "temperature": "0.7",
    "context_limit": "128000",
    "proactive_summarization_threshold": "8000",
    "enable_summarize": "true",
    "n_epochs": "2",
    "num_substeps": "4",
    "remove_constant_reward_groups": "true",
    "normalize_advantages_by_std": "true",
    "loss_fn": "ppo",
    "wandb_project": "harbor-training",
    "wandb_name": "qwen3-skyrl-tx",
}
RECIPE_OF_KIND = {"harbor": {"environment_type": "docker"}, "tau_bench": {"use_native_tool_calling": "true"}}


def main(argv: list[str]) -> int:
    load_dotenv(ROOT / ".env")
    load_dotenv(ROOT / ".env.skyrl-tx")
    if any(argument in ("--help", "-h") for argument in argv):
        return subprocess.call([sys.executable, "-m", "src.train", "--help"])
    given = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    malformed = [argument for argument in argv if "=" not in argument]
    if malformed:
        return fail(f"{malformed[0]!r} is not key=value; example: ./run_skyrl_tx.sh max_steps=4")
    try:
        return full_recipe(given) if "model_name" in given else quick_start(given)
    except KeyboardInterrupt:  # before the trainer runs, who ends cleanly by himself
        fail("stopped")
        return 130


def quick_start(given: dict[str, str]) -> int:
    started = time.monotonic()
    kind = given.get("env", "data" if "data" in given else "harbor")
    if kind not in QUICKSTARTS:
        return fail(
            f"env={kind} has no quick start; give model_name=MODEL, or one of "
            f"env={', env='.join(QUICKSTARTS)}"
        )
    if "skyrl_tx_url" in given:
        return fail(
            "the quick start starts a server of its own; leave skyrl_tx_url= out, or give model_name= for "
            "a run on that one"
        )
    chosen = QUICKSTARTS[kind]
    say(f"quick start: {chosen.says}")
    options = {**QUICKSTART_OPTIONS, "tokenizer": str(chosen.folder / "model"), **chosen.options, **given}
    options.setdefault("seed", "0")
    options.setdefault(
        "log_path",
        f"{options['logs_dir']}/{chosen.folder.name}-{datetime.now():%Y%m%d-%H%M%S}-seed{options['seed']}",
    )
    options["skyrl_tx_url"] = url = f"http://127.0.0.1:{free_port()}"
    check_options(options)
    side_files = Path(options["log_path"] + ".server")
    key = new_key()
    server = start_server(
        url,
        (
            f"base_model={chosen.folder / 'model'}",
            f"model_alias={options['model_name']}",
            *QUICKSTART_SERVER,
            f"checkpoints_dir={side_files / 'checkpoints'}",
        ),
        side_files,
        key=key,
    )
    status = train(options, server, key=key)
    say(
        f"everything took {(time.monotonic() - started) / 60:.1f} min; server log and checkpoints: "
        f"{side_files}"
    )
    return status


def full_recipe(given: dict[str, str]) -> int:
    kind = given.get("env", "data" if "data" in given else "harbor")
    options = {**RECIPE_OPTIONS, **RECIPE_OF_KIND.get(kind, {}), **given}
    if kind == "harbor" and "tasks_dir" not in options:
        return fail(
            "model_name needs tasks_dir=FOLDER_OF_HARBOR_TASKS, for example "
            "tasks_dir=./datasets/terminal-bench-2"
        )
    url = options.setdefault("skyrl_tx_url", os.environ.get("SKYRL_TX_URL", "http://localhost:8000"))
    base_model = options["model_name"]
    if Path(base_model).expanduser().is_dir():  # clients ask for org/name, never for a path
        options["model_name"] = f"local/{Path(base_model).expanduser().resolve().name}"
        options.setdefault("tokenizer", base_model)
    server = key = None
    if healthy(url):
        say(f"using the server at {url}")
    elif httpx.URL(url).host not in ("localhost", "127.0.0.1"):
        return fail(
            f"no server answers at skyrl_tx_url={url}; start it there with scripts/start_skyrl_tx.sh "
            f"{base_model}"
        )
    elif httpx.URL(url).scheme != "http":
        return fail(
            f"no server answers at skyrl_tx_url={url}, or its certificate is not trusted here: set "
            "SSL_CERT_FILE=CERT.pem"
        )
    else:
        options["skyrl_tx_url"] = url = f"http://127.0.0.1:{httpx.URL(url).port or 8000}"
        check_options(options)
        names = (f"base_model={base_model}", f"model_alias={options['model_name']}")
        sizes = (
            f"max_lora_rank={options.get('lora_rank', '32')}",
            f"max_context_length={options['context_limit']}",
            "yarn=true",
        )
        key = new_key()
        server = start_server(
            url, (*names, *sizes), Path("runs") / f"server-{datetime.now():%Y%m%d-%H%M%S}", key=key
        )
    return train(options, server, key=key)


def check_options(options: dict[str, str]) -> None:
    """Ends here with the trainer's own line for what it would not understand, before a server is started for
    it."""
    try:
        check_environment(parse(trainer_arguments(options)))
    except ConfigError as error:
        sys.exit(fail(str(error)))
    tasks_dir = options.get("tasks_dir")
    if tasks_dir is not None and not Path(tasks_dir).expanduser().is_dir():
        sys.exit(fail(f"tasks_dir {tasks_dir} is not a folder; give a folder of Harbor task folders"))


def trainer_arguments(options: dict[str, str]) -> list[str]:
    return ["backend=skyrl-tx", *(f"{key}={value}" for key, value in options.items())]


def train(options: dict[str, str], server: subprocess.Popen[bytes] | None, *, key: str | None) -> int:
    """Run the trainer to its end, passing on signals; then stop the server this process started, whose key is
    `key`."""
    command = [sys.executable, "-m", "src.train", *trainer_arguments(options)]
    # Without this process there is soon no server either, so a trainer left alone could save nothing.
    environment = os.environ | ({} if key is None else {"TINKER_API_KEY": key})
    trainer = subprocess.Popen(command, env=environment, preexec_fn=partial(die_with_parent, signal.SIGKILL))
    # The terminal sends Ctrl-C to the trainer as well; here it must only wait for the trainer's clean end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: trainer.terminate())
    status = trainer.wait()
    if server is not None:
        say_programs(options["skyrl_tx_url"], key=key or "")
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    return status if status >= 0 else 128 - status


def say_programs(url: str, *, key: str) -> None:
    """How many XLA programs the run needed; a warm start reads them from the compilation cache."""
    try:
        engine = httpx.get(f"{url}/api/v1/stats", headers={"X-API-Key": key}, timeout=5.0).json()["engine"]
    except (httpx.HTTPError, ValueError, KeyError):
        return  # the server is gone, and the trainer has said so
    programs = ", ".join(f"{name} {count}" for name, count in engine["programs"].items())
    say(
        f"XLA programs: {sum(engine['programs'].values())} ({programs}), {engine['programs_from_cache']} "
        "from the cache"
    )


def new_key() -> str:
    """For a server of this process's own. Without one, every process of this machine could train on the
    server, a trial's too."""
    return f"tml-{secrets.token_urlsafe(32)}"


def start_server(
    url: str, arguments: tuple[str, ...], side_files: Path, *, key: str
) -> subprocess.Popen[bytes]:
    """Start the server and wait until it can work; exits with the server's own error when it cannot. Its log
    and its key are in `side_files`, which this user alone can read; it gets the key by its environment,
    because every user can read arguments."""
    try:
        make_private(side_files)
    except ConfigError as error:
        sys.exit(fail(str(error)))
    log_file, key_file = side_files / "server.log", side_files / KEY_FILE
    write_private(key_file, key + "\n")
    say(f"starting the server at {url} (log: {log_file}, key: {key_file})")
    address = httpx.URL(url)
    with log_file.open("ab") as log:  # what an earlier server of a resumed run said stays
        starts_at = log.tell()
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "skyrl_tx_server",
                f"host={address.host}",
                f"port={address.port}",
                *arguments,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"SKYRL_TX_API_KEY": key},
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    started = time.monotonic()
    while not healthy(url):
        if server.poll() is not None:
            lines = [line for line in said(log_file, starts_at) if line.strip()]
            sys.exit(
                fail(
                    f"the server stopped with status {server.returncode}: "
                    f"{lines[-1] if lines else 'no output'}"
                )
            )
        if time.monotonic() - started > START_TIMEOUT_S:
            server.kill()
            sys.exit(fail(f"the server did not come up within {START_TIMEOUT_S:.0f} s; see {log_file}"))
        time.sleep(0.2)  # another process: there is no event to wait for
    ready = [line for line in said(log_file, starts_at) if "server ready" in line]
    say(f"{ready[-1] if ready else 'server ready'} (after {time.monotonic() - started:.1f} s)")
    return server


def said(log_file: Path, starts_at: int) -> list[str]:
    """The lines of a log from that byte on."""
    return log_file.read_bytes()[starts_at:].decode(errors="replace").splitlines()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=2.0).json() == {"status": "ok"}
    except (httpx.HTTPError, ValueError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent(with_signal: signal.Signals) -> None:
    """In the child, before exec: ask Linux for `with_signal` when the parent dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, with_signal)


def say(text: str) -> None:
    try:
        print(f"run_skyrl_tx: {text}", flush=True)
    except OSError:  # nobody reads any more; what it holds back is not to fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str) -> int:
    print(f"run_skyrl_tx: {text}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
