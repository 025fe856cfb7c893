"""Command line of supervised fine-tuning: `python -m src.sft data=chats.jsonl key=value ...`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from src.cli.command_line import help_for, parse_as
from src.cli.config_file import with_config_files
from src.cli.environment_variables import load_environment, with_locations_from_environment
from src.cli.program import run_program
from src.core.log_setup import set_log_levels
from src.core.process import STOPPING, exit_on_signal, exit_process, run_until_signal
from src.policy.served_model import fitted_to_server, with_served_model
from src.sft.config import SftConfig

TITLE = [
    "python -m src.sft data=chats.jsonl key=value ...",
    "",
    "Fine-tune a LoRA adapter on chats through the Tinker API. RL can start from the checkpoint.",
]


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, lambda words: help_for(SftConfig, title=TITLE, words=words))


def _run(argv: Sequence[str]) -> int:
    with exit_on_signal():
        argv = with_config_files(argv)
        load_environment(argv)
        argv = with_locations_from_environment(argv, names=("skyrl_tx_url",))
        config = parse_as(SftConfig, argv := with_served_model(argv))
        config = fitted_to_server(config, argv, {"context_limit": config.context_limit})
        # These imports take seconds. They are deferred so that --help and option errors appear at once.
        from src.cli.console import Display, terminal
        from src.sft.run import run

        set_log_levels()
        display = Display(terminal())
        return asyncio.run(
            run_until_signal(
                run(config, display), display.say, announcement=STOPPING, stop_timeout_s=config.stop_timeout_s
            )
        )


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
