"""Environment variables that set options, and the `.env` files that set environment variables.

The functions `with_*` return changed command-line arguments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dotenv import load_dotenv

from src.envs.options import WITHOUT_TAU2


def load_environment(argv: Sequence[str]) -> None:
    """Set environment variables from the file `.env` in the working directory and, if `argv` has
    backend=skyrl-tx, from the file `.env.skyrl-tx` in the same directory. Then set variables that libraries
    read.

    A variable that is already set keeps its value, so `.env` takes precedence over `.env.skyrl-tx`.
    """
    load_dotenv(Path(".env"))
    if "backend=skyrl-tx" in argv:
        load_dotenv(Path(".env.skyrl-tx"))
        os.environ.setdefault("TINKER_TELEMETRY", "0")
    set_library_variables()


def set_library_variables() -> None:
    """Set variables that libraries read, unless they are set already. Call this before Harbor is imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without this variable, transformers warns that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Without this variable, LiteLLM downloads a list of prices when Harbor imports it.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def with_locations_from_environment(
    argv: Sequence[str], *, names: Collection[str] = ("skyrl_tx_url", "tau2_home")
) -> list[str]:
    """Return `argv` with options from environment variables.

    - tau2_home is added from TAU2_HOME if the last option `env` (in SkyRL: `environment.env_class`) names a
      task environment that reads tau2_home.
    - skyrl_tx_url is added from SKYRL_TX_URL if `argv` has backend=skyrl-tx.

    An option is added only if it is in `names` and not in `argv`, and its environment variable is not empty.
    `names` must contain only options that the program has.
    """
    url = os.environ.get("SKYRL_TX_URL") if "backend=skyrl-tx" in argv else None
    pairs = [argument.partition("=") for argument in argv]
    # In SkyRL, the option `environment.env_class` selects the task environment.
    environments = [value for name, _, value in pairs if name.rpartition(".")[2] in ("env", "env_class")]
    reads_tau2 = bool(environments) and environments[-1] not in WITHOUT_TAU2
    defaults = {"skyrl_tx_url": url, "tau2_home": os.environ.get("TAU2_HOME") if reads_tau2 else None}
    present = {name for name, _, _ in pairs}
    added = {
        name: value for name, value in defaults.items() if value and name in names and name not in present
    }
    return [*argv, *(f"{name}={value}" for name, value in added.items())]


def with_judge_from_environment(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the options of the judge: taxonomy_feedback=true if TAXONOMY_FEEDBACK is `true`, and
    taxonomy_alpha from TAXONOMY_ALPHA.

    The added options come last, so they override options of the same name in `argv`. If SKYRL_MODE is unset,
    it is set to `train`. If SKYRL_MODE has a value other than `train`, TAXONOMY_FEEDBACK has no effect.
    """
    os.environ.setdefault("SKYRL_MODE", "train")
    feedback, alpha = os.environ.get("TAXONOMY_FEEDBACK", ""), os.environ.get("TAXONOMY_ALPHA")
    is_on = feedback.lower() == "true" and os.environ["SKYRL_MODE"] == "train"
    options = ["taxonomy_feedback=true"] if is_on else []
    return [*argv, *options, *([f"taxonomy_alpha={alpha}"] if alpha else [])]
