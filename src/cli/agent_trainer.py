"""`agent-trainer COMMAND ...`: one program for most commands of this project.

Each command replaces this process by a Python process that runs a module of the table `MODULES` with the
same arguments. `evaluate RUN`, `chat RUN` and `resume RUN` add the options of the run. If the launcher
(scripts/run_skyrl_tx.py) started the server of the run, these three commands run the launcher, which runs the
module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from src.cli.command_line import HELP, print_help
from src.cli.saved_options import (
    chat_arguments,
    evaluated_arguments,
    program_of,
    resumed_arguments,
    server_directory_of,
)
from src.core.errors import ConfigError

MODULES = {
    "train": ("src.train", "Train an agent"),
    "try": ("src.envs.try_env", "Run a few trials of an environment and print them"),
    "sft": ("src.sft", "Fine-tune on chats, before RL"),
    "evaluate": ("src.evaluate", "Evaluate a model, a checkpoint, an endpoint or a run (evaluate RUN)"),
    "chat": ("src.evaluate.chat", "Chat with a checkpoint or with the policy of a run (chat RUN)"),
    "show": ("src.analyze.show", "Print the rollouts of a run: show RUN [STEP | TASK | TRIAL] [STEP]"),
    "serve": ("skyrl_tx_server", "Serve a model over the Tinker API"),
    "export": ("skyrl_tx_server.export", "Export an adapter, merge it into its model, or import one"),
    "keys": ("skyrl_tx_server.keys", "Create, remove or list the API keys of tenants"),
    "probe": ("src.evaluate.probe", "Check which options an endpoint applies"),
    "doctor": ("src.analyze.doctor", "Check this machine or a run (doctor RUN), and print what to do"),
    "validate": ("src.envs.validate", "Check the tasks of a directory"),
}
"""Command -> module that is run with the remaining arguments, and the help text of the command."""
RUN_COMMANDS = {"evaluate": evaluated_arguments, "chat": chat_arguments}
"""Command that takes the directory of a run -> function that returns the arguments of its module."""
RESUME = "Continue a run with the options that it was started with: resume RUN [key=value ...]"
LAUNCHER = "scripts.run_skyrl_tx"  # exists only in a checkout; starts the server of a run again


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command. Return 0 for help, or 2 for a missing or invalid command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in HELP:
        print_help(help_text())
        return 0 if arguments else 2
    try:
        command = command_line(arguments[0], arguments[1:])
    except ConfigError as error:
        print(f"agent-trainer: {error}", file=sys.stderr)
        return 2
    os.execv(sys.executable, [sys.executable, "-m", *command])


def command_line(name: str, arguments: list[str]) -> list[str]:
    """Return the module of a command and its arguments. Raises ConfigError for an unknown command or run."""
    first_help = next((index for index, argument in enumerate(arguments) if argument in HELP), None)
    if first_help is not None and name in (*RUN_COMMANDS, "resume"):
        module = MODULES["train" if name == "resume" else name][0]
        if name == "resume" and first_help > 0:
            module = program_of(arguments[0])
        return [module, *arguments[first_help:]]
    if name in RUN_COMMANDS and arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        return _for_run(arguments, RUN_COMMANDS[name], name, MODULES[name][0])
    if name in MODULES:
        return [MODULES[name][0], *arguments]
    if name != "resume":
        raise ConfigError(f"unknown command {name!r}; commands are {', '.join([*MODULES, 'resume'])}")
    if not arguments:
        raise ConfigError("resume needs the directory of a run: agent-trainer resume RUN [key=value ...]")
    return _for_run(arguments, resumed_arguments, "resume", program_of(arguments[0]))


def help_text() -> str:
    lines = ["agent-trainer COMMAND [key=value ...]", ""]
    commands = {name: text for name, (_, text) in MODULES.items()} | {"resume": RESUME}
    lines += [f"  {name:10} {text}" for name, text in commands.items()]
    return "\n".join([*lines, "", "agent-trainer COMMAND --help [WORD] lists the options of a command."])


def _for_run(
    arguments: list[str], options_of: Callable[[str, list[str]], list[str]], command: str, module: str
) -> list[str]:
    """Return the module to run and its arguments. The module is the launcher if it exists and started the
    server of the run, or else `module`.
    """
    run, changes = arguments[0], arguments[1:]
    options = options_of(run, changes)
    if server_directory_of(run) is not None and importlib.util.find_spec("scripts") is not None:
        return [LAUNCHER, f"{command}={run}", *changes]
    return [module, *options]


if __name__ == "__main__":
    sys.exit(main())
