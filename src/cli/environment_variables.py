"""Environment variables that set options, and the `.env` files that set environment variables."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dotenv import load_dotenv


def load_environment(argv: Sequence[str]) -> None:
    """Load `.env`, and `.env.skyrl-tx` with backend=skyrl-tx, and set variables of libraries.

    A variable that is already set keeps its value.
    """
    load_dotenv(Path(".env"))
    if "backend=skyrl-tx" in argv:
        load_dotenv(Path(".env.skyrl-tx"))
        os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that torch is missing
    # Without this variable, LiteLLM downloads a list of prices when Harbor imports it.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


def with_server_from_environment(
    argv: Sequence[str], *, names: Collection[str] = ("skyrl_tx_url", "tau2_home")
) -> list[str]:
    """Add skyrl_tx_url from SKYRL_TX_URL and tau2_home from TAU2_HOME, unless `argv` has them.

    Only options in `names` are added. A program that lacks one of the options leaves it out of `names`.
    """
    url = os.environ.get("SKYRL_TX_URL") if "backend=skyrl-tx" in argv else None
    defaults = {"skyrl_tx_url": url, "tau2_home": os.environ.get("TAU2_HOME")}
    present = {argument.partition("=")[0] for argument in argv}
    added = {
        name: value for name, value in defaults.items() if value and name in names and name not in present
    }
    return [*argv, *(f"{name}={value}" for name, value in added.items())]


def with_local_model(argv: Sequence[str]) -> list[str]:
    """Replace model_name=DIRECTORY by local/<directory name>, under which the server serves this model.

    The tokenizer is read from the directory, unless `argv` has tokenizer=.
    """
    values = {name: value for name, _, value in (argument.partition("=") for argument in argv)}
    directory = Path(values.get("model_name", "")).expanduser()
    if "backend=skyrl-tx" not in argv or not values.get("model_name") or not directory.is_dir():
        return list(argv)
    kept = [argument for argument in argv if not argument.startswith("model_name=")]
    tokenizer = [] if "tokenizer" in values else [f"tokenizer={directory}"]
    return [*kept, f"model_name=local/{directory.resolve().name}", *tokenizer]


def with_judge_from_environment(argv: Sequence[str]) -> list[str]:
    """Add the options that the variables TAXONOMY_FEEDBACK=true and TAXONOMY_ALPHA set.

    The added options replace options of the same name in `argv`. TAXONOMY_FEEDBACK has an effect only if
    SKYRL_MODE is unset or `train`.
    """
    os.environ.setdefault("SKYRL_MODE", "train")
    feedback, alpha = os.environ.get("TAXONOMY_FEEDBACK", ""), os.environ.get("TAXONOMY_ALPHA")
    is_on = feedback.lower() == "true" and os.environ["SKYRL_MODE"] == "train"
    options = ["taxonomy_feedback=true"] if is_on else []
    return [*argv, *options, *([f"taxonomy_alpha={alpha}"] if alpha else [])]
