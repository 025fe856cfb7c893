"""The options of the full recipe of `./run_skyrl_tx.sh`, and functions that fit them to a server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from netrc import NetrcParseError, netrc
from pathlib import Path

from skyrl_tx_server.config.engine_options import model_alias
from skyrl_tx_server.files.model_source import converted_directory, is_gguf, is_path
from src.core.errors import ConfigError
from src.core.length_limits import fitted_lengths
from src.policy.served_model import UNSET

DEFAULT_TASKS = "./datasets/terminal-bench-2"
WANDB_HOST = "api.wandb.ai"

RECIPE_OPTIONS = {
    "logs_dir": "./runs",
    "learning_rate": "2e-4",
    "batch_size": "2",
    "group_size": "16",
    "n_parallel_envs": "16",
    "max_tokens": "2048",
    "temperature": "0.7",
    "context_limit": "128000",
    "n_epochs": "2",
    "num_substeps": "4",
    "remove_constant_reward_groups": "true",
    "normalize_advantages_by_std": "true",
    "loss_fn": "ppo",
    "wandb_project": "harbor-training",
}
RECIPE_OF_KIND = {
    "harbor": {
        "environment_type": "auto",
        "proactive_summarization_threshold": "8000",
        "enable_summarize": "true",
    },
    "tau_bench": {"use_native_tool_calling": "true"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """Two names of one model and its tokenizer. `base_model` is the value of the server's option, and
    `served_name` is the name in the requests of clients."""

    base_model: str
    served_name: str
    tokenizer: str | None  # a directory; None: the trainer finds the tokenizer by `served_name`


def named_model(model_name: str) -> NamedModel:
    """Return the names of a model. `model_name` is a directory, a GGUF file, a packaged model (such
    as `smollm2-135m`) or a hub id.

    Raises ConfigError for a directory that does not exist, and the server's ConfigError for a GGUF file that
    cannot be converted.
    """
    if is_gguf(model_name):
        tokenizer = str(converted_directory(model_name))
    elif Path(model_name).expanduser().is_dir():
        tokenizer = model_name
    elif is_path(model_name):
        raise ConfigError(
            f"model_name={model_name}: no such directory; give a model directory, a GGUF file or a name on "
            "the Hugging Face hub"
        )
    else:
        return NamedModel(base_model=model_name, served_name=model_name, tokenizer=None)
    return NamedModel(base_model=model_name, served_name=model_alias(model_name, None), tokenizer=tokenizer)


def environment_kind(user_options: Mapping[str, str]) -> str:
    """Return the value of `env` for these options. Without `env`, the default depends on `data`."""
    return user_options.get("env", "data" if "data" in user_options else "harbor")


def recipe_defaults(kind: str, model: NamedModel, user_options: Mapping[str, str]) -> dict[str, str]:
    """Return all defaults of the recipe, with the name of a new run directory."""
    if "tasks_dir" in user_options:
        task_source = Path(user_options["tasks_dir"]).expanduser().resolve().name
    elif "data" in user_options:
        task_source = Path(user_options["data"].partition(",")[0]).stem
    else:
        task_source = kind.rpartition(":")[2]
    name = f"{task_source}-{model.served_name.rpartition('/')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    if (wandb_name := user_options.get("wandb_name", "")).lower() not in UNSET:
        name = wandb_name
    return {
        **RECIPE_OPTIONS,
        **RECIPE_OF_KIND.get(kind, {}),
        **({} if model.tokenizer is None else {"tokenizer": model.tokenizer}),
        "wandb_name": name,
        "log_path": f"{user_options.get('logs_dir', RECIPE_OPTIONS['logs_dir'])}/{name}",
    }


def fitted(
    options: Mapping[str, str], user_options: Mapping[str, str], *, context: int
) -> tuple[dict[str, str], str | None]:
    """Reduce the lengths that the user did not set, so that they fit the server's context of `context`
    tokens.

    Return (options, one line that lists the changed lengths or None if no length changed). Raises ConfigError
    if the user set a `context_limit` above `context`. `TrainerConfig` checks the other options of the user.
    """
    user_options = {name: value for name, value in user_options.items() if value.lower() not in UNSET}
    limit = int(options["context_limit"])
    if limit > context and "context_limit" in user_options:
        raise ConfigError(
            f"context_limit={limit} exceeds the server's {context} tokens; lower it, or start the server "
            f"with max_context_length={limit} yarn=true"
        )
    lengths = fitted_lengths(
        min(limit, context),
        max_tokens=int(options["max_tokens"]),
        threshold=int(options.get("proactive_summarization_threshold", 0)),
        given=user_options,
    )
    changed = {
        name: value for name, value in lengths.items() if name in options and value != int(options[name])
    }
    if not changed:
        return dict(options), None
    shown = ", ".join(f"{name}={value} instead of {options[name]}" for name, value in changed.items())
    return (
        {**options, **{name: str(value) for name, value in changed.items()}},
        f"fitted to the server's context of {context} tokens: {shown}",
    )


def fitted_to_user_lengths(options: Mapping[str, str], user_options: Mapping[str, str]) -> dict[str, str]:
    """Reduce the lengths that the user did not set, so that they fit the lengths that the user set. This
    function is used before the context of the server is known."""
    try:
        return fitted(options, user_options, context=sys.maxsize)[0]
    except ValueError:  # a length is not a number; the trainer reports the option
        return dict(options)


def wandb_is_set_up(environ: Mapping[str, str]) -> bool:
    """Return whether wandb can start without a prompt for a key at the terminal."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE"):
        return True
    try:
        return netrc(environ.get("NETRC")).authenticators(WANDB_HOST) is not None
    except (OSError, NetrcParseError):
        return False
