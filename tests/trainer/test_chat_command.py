"""Tests `agent-trainer chat`: conversations of a scripted user, options of a run, and errors."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import run_skyrl_tx
from skyrl_tx_server.http.http_handler import StartupState
from src.cli.agent_trainer import command_line
from src.cli.command_line import parse_as
from src.cli.saved_options import SERVER_FILE
from src.core.errors import BackendError, ConfigError
from src.evaluate.chat import __main__ as program
from src.evaluate.chat.config import ChatConfig
from src.evaluate.chat.conversation import Conversation, talk
from tests.fakes.policy import FakePolicy
from tests.fakes.server import fake_context, fake_engine, serving
from tests.fakes.text_engine import save_tokenizer
from tests.fakes.tokenizer import toy_chat
from tests.trainer.test_agent_trainer import write_run

OPTIONS = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1", "context_limit=60", "max_tokens=8"]


def reader(lines: list[str | Exception]) -> Callable[[], str]:
    """Return a function that returns or raises the lines in order, and then raises EOFError."""
    remaining = iter([*lines, EOFError()])

    def read() -> str:
        line = next(remaining)
        if isinstance(line, Exception):
            raise line
        return line

    return read


def chat_with(
    replies: list[str | Exception], lines: list[str | Exception], *options: str
) -> tuple[list[str], list[str]]:
    """Run a chat in which the user types `lines` and the policy answers with `replies`.

    Returns what the program writes, and the prompts that the policy receives.
    """
    chat, written = toy_chat(), []
    policy = FakePolicy(chat, replies)
    conversation = Conversation(policy, chat, parse_as(ChatConfig, [*OPTIONS, *options]))
    talk(
        lambda text: asyncio.run(conversation.answer(text)),
        conversation.reset,
        read=reader(lines),
        write=written.append,
    )
    return written, [chat.decode([*call.prompt_ids, 0])[:-1] for call in policy.calls]


def test_each_answer_continues_the_conversation() -> None:
    written, prompts = chat_with(["hello", "fine"], ["hi", "", "you?"])
    assert written == ["hello", "fine"]
    assert prompts == ["\x01u\nhi\x02\n\x01a\n", "\x01u\nhi\x02\n\x01a\nhello\x02\n\x01u\nyou?\x02\n\x01a\n"]


def test_reset_clears_the_conversation_and_exit_ends_the_chat() -> None:
    written, prompts = chat_with(["a"], ["hi", "/reset", "again", "/exit", "never"], "system=S")
    assert written == ["a", "a new conversation starts", "a"]
    assert prompts == ["\x01s\nS\x02\n\x01u\nhi\x02\n\x01a\n", "\x01s\nS\x02\n\x01u\nagain\x02\n\x01a\n"]


def test_an_invalid_input_line_gives_a_one_line_error() -> None:
    undecodable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    written, prompts = chat_with(["a"], ["/rest", undecodable, "x" * 80, "/home/x?"])
    assert written == [
        "error: unknown command /rest; commands are /reset and /exit",
        "error: the line is not UTF-8 text; type it again",
        "error: the conversation has 88 tokens, more than max_input_length=59; type /reset, or a shorter "
        "message",
        "a",
    ]
    assert len(prompts) == 1


def test_a_cut_answer_is_marked_and_control_codes_are_removed() -> None:
    assert chat_with(["long answer", "\x1b[2Jb"], ["hi", "hi"])[0] == [
        "long ans [cut at the token limit]",
        "[2Jb",
    ]


def test_a_lost_server_ends_the_chat() -> None:
    with pytest.raises(BackendError, match="gone"):
        chat_with([BackendError("gone")], ["hi"])


def test_chat_takes_the_options_of_a_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    write_run(directory, eval_temperature="0.2", eval_top_p="0.9", tokenizer="t")
    command, *arguments = command_line("chat", [str(directory), "system=S"])
    config = parse_as(ChatConfig, arguments)
    assert (command, config.checkpoint, config.system) == ("src.evaluate.chat", str(directory), "S")
    assert (config.model_name, config.tokenizer, config.skyrl_tx_url) == (
        "org/name",
        "t",
        "http://127.0.0.1:1",
    )
    assert (config.temperature, config.top_p, config.max_tokens) == (0.2, 0.9, 100)
    other = parse_as(ChatConfig, command_line("chat", [str(directory), "checkpoint=tinker://a/b/c"])[1:])
    assert other.checkpoint == "tinker://a/b/c"
    assert command_line("chat", ["model_name=m"]) == ["src.evaluate.chat", "model_name=m"]
    with pytest.raises(ConfigError, match="'fast' is not key=value; write chat RUN"):
        command_line("chat", [str(directory), "fast"])


def test_chat_starts_the_server_of_the_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run.server").mkdir()
    (tmp_path / "run.server" / SERVER_FILE).write_text('["base_model=m"]')
    (tmp_path / "run.server" / "api_key").write_text("tml-old\n")
    launched = command_line("chat", [str(tmp_path / "run"), "system=S"])
    assert launched == ["scripts.run_skyrl_tx", f"chat={tmp_path / 'run'}", "system=S"]
    started: list[tuple[str, ...]] = []
    chats: list[tuple[dict[str, str], str]] = []
    monkeypatch.setattr(
        run_skyrl_tx, "start_server", lambda url, arguments, *_, **__: started.append(arguments)
    )
    monkeypatch.setattr(
        run_skyrl_tx, "train", lambda options, _, *, key, module: chats.append((options, module)) or 0
    )
    assert run_skyrl_tx.main(launched[1:]) == 0 and started == [("base_model=m",)]
    ((options, module),) = chats
    assert module == "src.evaluate.chat" and options["system"] == "S"
    assert parse_as(ChatConfig, run_skyrl_tx.trainer_arguments(options)).max_tokens == 100


@pytest.mark.official_sdk
def test_the_program_ends_when_its_input_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\n/what\n"))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    context = fake_context(tmp_path / "checkpoints")
    engine = fake_engine(context)
    engine.info = replace(engine.info, vocab_size=260)
    with serving(StartupState(state=context)) as url:
        options = [f"skyrl_tx_url={url}", f"tokenizer={tokenizer}", "context_limit=64", "max_tokens=4"]
        assert program.main(["backend=skyrl-tx", "model_name=local/fake", *options]) == 0
    printed = capsys.readouterr()
    first, answer, *rest = printed.out.splitlines()
    assert first == "chatting with local/fake; /reset, /exit, Ctrl-D" and answer
    assert rest[-2:] == [
        "a new conversation starts",
        "error: unknown command /what; commands are /reset and /exit",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["checkpoint=nowhere"], "neither a tinker:// path nor a run directory with a checkpoint"),
        (["checkpoint=tinker://a/weights/b"], "tinker://a/sampler_weights/b"),
        (["max_tokens=60"], "leaves no room for a prompt in context_limit=60"),
        (["sistem=x"], "did you mean system?"),
    ],
)
def test_a_wrong_chat_option_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert program.main([*OPTIONS, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_ctrl_c_ends_the_chat_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: ChatConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "chat", interrupted)
    assert program.main(OPTIONS) == 130
    assert capsys.readouterr().err == ""
