"""The help of `./run_skyrl_tx.sh`: the options that only this script has, and its defaults that differ from
those of `src.train`."""

from __future__ import annotations

import inspect
from pathlib import Path

from scripts.quick_starts import QUICKSTARTS
from scripts.recipe_options import RECIPE_OF_KIND, RECIPE_OPTIONS
from src.cli.command_line import parse
from src.cli.saved_options import option_text
from src.config import TrainerConfig

SCRIPT = Path(__file__).resolve().parent.parent / "run_skyrl_tx.sh"
LAUNCHER_OPTIONS = {
    "resume": "Continue the run in RUN with its options; further options replace them: resume=RUN",
    "evaluate": "Evaluate the last checkpoint of a run on its held-out tasks: evaluate=RUN",
    "chat": "Chat with the last checkpoint of a run: chat=RUN",
    "quickstart": f"Run a quick start: quickstart={' | '.join(QUICKSTARTS)}",
    "checkpoints_dir": "Checkpoints of a server that this command starts: checkpoints_dir=DIRECTORY",
}
"""The options that only the launcher has, with their help texts."""


def help_text() -> str:
    """Return the usage lines of the script, the options of the launcher and the defaults of its recipe."""
    lines = [*usage(), "", "Options of this command, in addition to those of python -m src.train:"]
    lines += [f"  {name:15} {text}" for name, text in LAUNCHER_OPTIONS.items()]
    lines += ["", "Defaults that differ from those of python -m src.train:"]
    lines += changed_defaults({"backend": "skyrl-tx", **RECIPE_OPTIONS}, kind="harbor")
    for kind, options in RECIPE_OF_KIND.items():
        lines += [f"{line}   with env={kind}" for line in changed_defaults(options, kind=kind)]
    return "\n".join(
        [
            *lines,
            "",
            "Length limits that you do not set are lowered to fit the context of the server. wandb is used "
            "if it is set up.",
            "A quick start has other values, which are in the config.json of its run directory.",
            "",
            "--help WORD lists options with a word that begins with WORD; docs/options.md lists all options.",
        ]
    )


def usage() -> list[str]:
    """Return the first two paragraphs of the comment at the start of the script."""
    comment = SCRIPT.read_text(encoding="utf-8").partition("\nset ")[0].splitlines()[1:]
    paragraphs = "\n".join(line.removeprefix("#").removeprefix(" ") for line in comment).split("\n\n")
    return "\n\n".join(paragraphs[:2]).splitlines()


def changed_defaults(options: dict[str, str], *, kind: str) -> list[str]:
    """Return a line for each option whose value is not the default of the trainer."""
    run = {"backend": "skyrl-tx", "skyrl_tx_url": "http://h:1", "model_name": "m", "env": kind}
    tasks = {"tasks_dir": "t"} if kind == "harbor" else {}
    config = parse([f"{name}={value}" for name, value in (run | tasks | options).items()])
    parameters = inspect.signature(TrainerConfig).parameters
    return [
        f"  {name} = {value}, not {option_text(parameters[name].default)}"
        for name, value in options.items()
        if getattr(config, name) != parameters[name].default
    ]
