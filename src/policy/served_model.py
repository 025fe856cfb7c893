"""Options that follow from the model of a skyrl-tx server: its name, its tokenizer and its context.

A tokenizer and lengths that the user has set are kept. If the server does not answer, options that depend on
its answer are not changed. The program reports the missing answer later, when it connects.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz

from src.core.errors import ConfigError
from src.core.length_limits import fitted_lengths
from src.policy.options import BackendOptions
from src.policy.running_server import ServedModels, find_server, tokenizer_directory

UNSET = ("", "none", "null")
"""The values of an option that mean that the option is not set."""
LOCAL = "local/"
"""The prefix of the names of served models that are not on a hub."""


def with_served_model(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the name under which the server serves the model, and with the model's tokenizer.

    `argv` is changed only if it has backend=skyrl-tx and its model_name is a directory, a GGUF file, a name
    without a slash such as smollm2-135m, or local/NAME. Other model names are hub ids, and the hub has their
    tokenizers.

    A tokenizer in `argv` is kept. Otherwise the tokenizer is that in the directory model_name or, if
    model_name is no directory, that in the directory that the server reports. If the server reports no
    directory on this machine, `argv` is not changed.
    """
    values = values_of(argv)
    name, url = values.get("model_name", ""), values.get("skyrl_tx_url")
    if values.get("backend") != "skyrl-tx" or not name:
        return list(argv)
    path = Path(name).expanduser()
    if path.is_dir():
        return _with(argv, model_name=_served_name(path.resolve().name), tokenizer=str(path))
    is_local = name.startswith(LOCAL) or "/" not in name or _is_gguf(path)
    if not is_local or url is None:
        return list(argv)
    served = name if name.startswith(LOCAL) else _served_name(path.stem if _is_gguf(path) else name)
    if _is_set(values, "tokenizer"):
        return _with(argv, model_name=served, tokenizer=values["tokenizer"])
    directory = tokenizer_directory(url, model_name=served, key=_key())
    return list(argv) if directory is None else _with(argv, model_name=served, tokenizer=directory)


def _served_name(name: str) -> str:
    """Return the name under which the server serves a local model. The server also replaces `:` by `-`."""
    return f"{LOCAL}{name.replace(':', '-')}"


def fitted_to_server[Config: BackendOptions](
    config: Config, argv: Sequence[str], lengths: Mapping[str, int]
) -> Config:
    """Return `config` with lengths that fit the context of a skyrl-tx server, and print them.

    `lengths` has the values of `context_limit` and of the other lengths of the program. Lengths in `argv` are
    kept. Nothing is changed if the context is large enough or `argv` has context_limit. Raises ConfigError if
    a length in `argv` does not fit.
    """
    values = values_of(argv)
    set_by_user = {name: value for name, value in values.items() if _is_set(values, name)}
    if config.backend != "skyrl-tx" or config.skyrl_tx_url is None or "context_limit" in set_by_user:
        return config
    models = find_server(config.skyrl_tx_url, key=_key())
    context = models.contexts.get(config.model_name) if isinstance(models, ServedModels) else None
    if context is None or context >= lengths["context_limit"]:
        return config
    fitted = fitted_lengths(
        context,
        max_tokens=lengths.get("max_tokens", context),
        threshold=lengths.get("proactive_summarization_threshold", 0),
        given=set_by_user,
    )
    changes = {name: value for name, value in fitted.items() if name in lengths}
    shown = " ".join(f"{name}={value}" for name, value in changes.items())
    print(f"note: fitted to the server's context of {context} tokens: {shown}", file=sys.stderr)
    try:
        return chz.replace(config, **changes)
    except ValueError as error:  # an option of the user does not fit
        raise ConfigError(str(error)) from error


def values_of(argv: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` arguments. If a key is repeated, its last value counts."""
    return {name: value for name, _, value in (argument.partition("=") for argument in argv)}


def _with(argv: Sequence[str], *, model_name: str, tokenizer: str) -> list[str]:
    """Return `argv` with the given model_name, and with the given tokenizer if `argv` sets no tokenizer."""
    changes = {"model_name": model_name}
    if not _is_set(values_of(argv), "tokenizer"):
        changes["tokenizer"] = tokenizer
    kept = [argument for argument in argv if argument.partition("=")[0] not in changes]
    return [*kept, *(f"{name}={value}" for name, value in changes.items())]


def _is_set(values: Mapping[str, str], name: str) -> bool:
    return values.get(name, "").lower() not in UNSET


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _key() -> str:
    return os.environ.get("TINKER_API_KEY", "")
