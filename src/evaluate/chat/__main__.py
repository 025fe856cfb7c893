"""Command line of the chat: `agent-trainer chat RUN`, or `python -m src.evaluate.chat key=value ...`.

Exit status: 0 (/exit or end of input), 1 (the server failed), 2 (wrong options), 130 (interrupted).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from src.cli.command_line import help_for, parse_as
from src.cli.config_file import with_config_files
from src.cli.environment_variables import load_environment, with_locations_from_environment
from src.cli.program import run_program
from src.core.errors import BackendError
from src.core.log_setup import set_log_levels
from src.core.process import deadline, exit_process
from src.evaluate.chat.config import ChatConfig
from src.evaluate.chat.conversation import COMMANDS, Answer, Conversation, talk
from src.policy.backend import connect
from src.policy.chat import load_chat
from src.policy.served_model import fitted_to_server, with_served_model
from src.records.checkpoints import sampler_path

TITLE = [
    "python -m src.evaluate.chat key=value ...",
    "",
    "Chat with a checkpoint or the base model. agent-trainer chat RUN takes its options from a run.",
    "Commands in the chat: " + ", ".join(f"{name} {text}" for name, text in COMMANDS.items()) + ".",
]
PROMPT = "you> "


@asynccontextmanager
async def opened(config: ChatConfig) -> AsyncGenerator[Conversation]:
    """Connect to the endpoint, open the policy and yield a conversation with it."""
    checkpoint = sampler_path(config.checkpoint)
    limit_s = config.request_timeout_s
    template = load_chat(config.tokenizer or config.model_name, enable_thinking=config.enable_thinking)
    async with connect(config) as endpoint:
        async with deadline(
            limit_s, BackendError, f"the server opened no policy within request_timeout_s={limit_s:g}"
        ):
            policy = await endpoint.open_policy(checkpoint)
        yield Conversation(policy, template, config)


def read_line() -> str:
    return input(PROMPT if sys.stdin.isatty() else "")


def say(text: str) -> None:
    print(text, flush=True)


def chat(config: ChatConfig) -> None:
    """Chat until /exit or the end of input.

    The event loop runs only to connect, to answer and to close the connection, so that the terminal's line
    editing and Ctrl-C work as in other programs.
    """
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            conversation = runner.run(stack.enter_async_context(opened(config)))
            say(f"chatting with {config.checkpoint or config.model_name}; {', '.join(COMMANDS)}, Ctrl-D")
            limit_s = config.request_timeout_s

            async def answer(text: str) -> Answer:
                async with deadline(
                    limit_s, BackendError, f"the server gave no answer within request_timeout_s={limit_s:g}"
                ):
                    return await conversation.answer(text)

            talk(lambda text: runner.run(answer(text)), conversation.reset, read=read_line, write=say)
        finally:
            runner.run(stack.aclose())


def main(argv: Sequence[str]) -> int:
    return run_program(argv, _run, lambda words: help_for(ChatConfig, title=TITLE, words=words))


def _run(argv: Sequence[str]) -> int:
    argv = with_config_files(argv)
    load_environment(argv)
    argv = with_locations_from_environment(argv, names=["skyrl_tx_url"])
    config = parse_as(ChatConfig, argv := with_served_model(argv))
    lengths = {"context_limit": config.context_limit, "max_tokens": config.max_tokens}
    config = fitted_to_server(config, argv, lengths)
    with suppress(ImportError):
        import readline  # noqa: F401 # pyright: ignore[reportUnusedImport]  gives `input` line editing and a history
    set_log_levels()
    try:
        chat(config)
    except KeyboardInterrupt:
        say("")  # ends the line on which the terminal shows the prompt and ^C
        raise
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
