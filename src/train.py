"""Command line of the trainer: `python -m src.train key=value ...`. Exit status 0, 1 (failed), 2 (wrong options), 130 (interrupted)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dotenv import load_dotenv

from src.cli.command_line import help_text, parse, print_help
from src.core.errors import INTERRUPTED, TrainerError
from src.core.process import exit_on_signal, exit_process, run_until_signal

DEBUG_SWITCHES = {
    "DEBUG_PARSER": "src.envs.service.tool_calls",
    "DEBUG_LENGTH_FILTERING": "src.learning.filters",
}  # the seeds' -> who logs
STOPPING = "stopping: saving a checkpoint first (once more to stop at once)"


def main(argv: Sequence[str]) -> int:
    """Runs the trainer and says what went wrong in one line. TRAINER_DEBUG=1 shows tracebacks."""
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(help_text())
        return 0
    load_environment(argv)
    try:
        with exit_on_signal():
            config = parse(with_judge_from_environment(with_server_from_environment(argv)))
            from src.cli.console import Display, terminal
            from src.loop.run import run  # seconds of imports that --help and a typing mistake do not need

            quieten()
            display = Display(terminal())
            work = run(config, display)
            return asyncio.run(
                run_until_signal(
                    work, display.say, announcement=STOPPING, stop_timeout_s=config.stop_timeout_sec
                )
            )
    except KeyboardInterrupt:  # nothing has begun
        return INTERRUPTED
    except TrainerError as error:
        if os.environ.get("TRAINER_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def load_environment(argv: Sequence[str]) -> None:
    """`.env`, then `.env.skyrl-tx` for a server of one's own; neither overrides what is set already."""
    load_dotenv(Path(".env"))
    if "backend=skyrl-tx" in argv:
        load_dotenv(Path(".env.skyrl-tx"))
        os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # there is no torch, on purpose
    os.environ.setdefault(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # else Harbor's import asks the network for prices


def with_server_from_environment(argv: Sequence[str]) -> list[str]:
    """SKYRL_TX_URL stands in for a skyrl_tx_url that was not given, and TAU2_HOME for a tau2_home."""
    stand_ins = {"skyrl_tx_url": os.environ.get("SKYRL_TX_URL") if "backend=skyrl-tx" in argv else None}
    stand_ins["tau2_home"] = os.environ.get("TAU2_HOME")
    given = {argument.partition("=")[0] for argument in argv}
    return [*argv, *(f"{name}={value}" for name, value in stand_ins.items() if value and name not in given)]


def with_judge_from_environment(argv: Sequence[str]) -> list[str]:
    """The seeds' own switches: TAXONOMY_FEEDBACK=true, unless SKYRL_MODE says that this process does not train, and TAXONOMY_ALPHA."""
    os.environ.setdefault("SKYRL_MODE", "train")
    feedback, alpha = os.environ.get("TAXONOMY_FEEDBACK", ""), os.environ.get("TAXONOMY_ALPHA")
    is_on = feedback.lower() == "true" and os.environ["SKYRL_MODE"] == "train"
    return [
        *argv,
        *(["taxonomy_feedback=true"] if is_on else []),
        *([f"taxonomy_alpha={alpha}"] if alpha else []),
    ]


def quieten() -> None:
    """Our own loggers speak, third parties only of trouble; what DEBUG_SWITCHES name speaks of every answer where its switch is 1."""
    logging.getLogger().setLevel(logging.INFO)
    for noisy in ("httpx", "httpcore", "LiteLLM", "harbor", "openai", "tinker", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for switch, name in DEBUG_SWITCHES.items():
        if os.environ.get(switch) == "1":
            logging.getLogger(name).setLevel(logging.DEBUG)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
