"""Tests env=fleet with a real MCP server and real verifiers: results, failures, and errors at the start."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.cli.command_line import parse, parse_as
from src.core.errors import ConfigError, SandboxError
from src.core.trajectory import FailureKind, Trajectory, TrialFailure, ZeroReason
from src.envs.fleet import mcp_session, verifier
from src.envs.fleet.environment import PROBE
from src.envs.registry import open_task_source
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.evaluate.config import EvaluateConfig
from tests.fakes.mcp_server import API_KEY, FailingServer, mcp_server
from tests.fakes.policy import FakePolicy
from tests.fakes.run import OWN_SERVER
from tests.fakes.tokenizer import byte_chat

NO_SANDBOX = why_no_sandbox()
pytestmark = pytest.mark.skipif(NO_SANDBOX is not None, reason=f"no sandbox here: {NO_SANDBOX}")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fleet" / "tasks.jsonl"
HIDDEN = "reset_tool=reset,verifier_tools=export_stock"
STOCK = "def verify(env): return env.call_tool('export_stock')['W1'] / 10"
ADD = '{"name": "add_stock", "arguments": {"item": "W1", "units": 3}}'


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with mcp_server() as url:
        yield url


def task_row(code: str = STOCK, env_key: str = "shop", **fields: object) -> dict[str, object]:
    row = {"task_key": "t", "env_key": env_key, "prompt": "Add 3 units of W1.", "verifier_code": code}
    return row | {"stock": {"W1": 5}} | fields


def opened(url: str, *rows: dict[str, object], directory: Path, options: str = HIDDEN):
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [*OWN_SERVER, "env=fleet", f"train_data={path}", "eval_split=0", "max_turns=9"]
    return open_task_source(
        parse([*argv, f"environment_kwargs=url={url}/{{env_key}}/mcp,{options}"]), byte_chat()
    )


async def run_trial(
    url: str, *answers: str, directory: Path, row: dict[str, object] | None = None, **options
):
    source = await asyncio.to_thread(opened, url, row or task_row(), directory=directory, **options)
    policy = FakePolicy(byte_chat(), answers)
    try:
        return await source.trial(source.train[0], directory=directory, seed=1, temperature=1.0).run(policy)
    finally:
        await source.close()


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def results(result: Trajectory | TrialFailure) -> list[str]:
    """Return the contents of the tool messages."""
    assert isinstance(result, Trajectory)
    return [str(message["content"]) for message in result.conversation if message["role"] == "tool"]


@pytest.mark.parametrize("env_key", ["shop", "streamed"])
@pytest.mark.seed_behaviour(140)
async def test_calls_change_the_state_that_the_verifier_reads(server: str, tmp_path: Path, env_key: str):
    row = task_row(env_key=env_key)
    result = await run_trial(server, ADD, "Done.", directory=tmp_path, row=row)
    assert isinstance(result, Trajectory) and (result.reward, result.zero_reason) == (0.8, None)
    assert results(result) == ['{"item":"W1","units":8}']
    assert result.tool_fields[2]["tool_calls"] and result.metrics["tool_calls"] == 1


async def test_the_agent_sees_all_tools_except_hidden_ones(server: str, tmp_path: Path):
    result = await run_trial(server, "Done.", directory=tmp_path)
    assert isinstance(result, Trajectory)
    system = str(result.conversation[0]["content"])
    assert "\n- add_stock(item: string, units: integer): Add units of an item." in system
    assert "export_stock" not in system and "reset" not in system
    assert system.count("\n- ") == len(FailingServer().tools) - 2


async def test_each_trial_has_its_own_state(server: str, tmp_path: Path):
    rewards = [await run_trial(server, ADD, "Done.", directory=tmp_path) for _ in range(2)]
    assert [result.reward for result in rewards if isinstance(result, Trajectory)] == [0.8, 0.8]


async def test_all_calls_of_an_answer_can_be_executed(server: str, tmp_path: Path):
    both = f"[{ADD}, {ADD}]"
    result = await run_trial(
        server, both, "Done.", directory=tmp_path, options=f"{HIDDEN},parallel_tool_calls=true"
    )
    assert isinstance(result, Trajectory) and (result.reward, len(results(result))) == (1.1, 2)


async def test_the_verifier_reads_the_final_answer(server: str, tmp_path: Path):
    code = "async def verify(env, final_answer): return final_answer == env.task['prompt']"
    result = await run_trial(server, "Add 3 units of W1.", directory=tmp_path, row=task_row(code))
    assert isinstance(result, Trajectory) and result.reward == 1.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (call("fail"), "Error: RuntimeError: out of paper"),
        (call("get_stock", item="nothing"), "Error: KeyError: 'nothing'"),
        (call("nothing"), "Error: there is no tool nothing; the tools are get_stock, add_stock, fail"),
        (call("export_stock"), "Error: there is no tool export_stock;"),
        (call("hang"), "Error: the call did not finish within 3 s"),
        (call("crash"), "Error: HTTP status 500"),
        (call("flood"), f"Error: the result is larger than {mcp_session.MAX_RESPONSE_BYTES} bytes"),
        (call("garbage"), "Error: the server's answer is not JSON"),
        (call("long"), "x" * 16_000 + "\n[34000 more characters are not shown]"),
        (call("surrogate"), "?"),
        ('{"name": "get_stock", "arguments": {"item": NaN}}', "Error: the arguments are not valid JSON"),
    ],
)
async def test_a_failed_call_is_text_for_the_agent(server: str, tmp_path: Path, answer: str, text: str):
    options = f"{HIDDEN},call_timeout_s={3 if 'hang' in answer else 60}"
    result = await run_trial(
        server, answer, ADD, "Done.", directory=tmp_path, options=options, row=task_row()
    )
    assert isinstance(result, Trajectory) and results(result)[0].startswith(text)
    assert result.reward == 0.8  # the session still works
    assert result.metrics["tool_errors"] == text.startswith("Error")


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ("die", "cannot be reached (RemoteProtocolError"),
        ("forget", "is unavailable (HTTP status 404"),
        ("freeze", "has stopped answering: the call did not finish within 0.5 s"),
    ],
)
async def test_a_lost_server_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, problem: str
):
    monkeypatch.setattr(mcp_session, "PING_TIMEOUT_S", 0.5)
    with mcp_server() as server:
        result = await run_trial(server, call(tool), directory=tmp_path, options=f"{HIDDEN},call_timeout_s=3")
    assert isinstance(result, TrialFailure) and result.kind is FailureKind.ENV_SERVER
    assert f"{server}/shop/mcp {problem}" in result.message and "\n" not in result.message


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def verify(env): raise KeyError('W9')", ZeroReason.VERIFIER_ERROR),
        ("def verify(env): return env.call_tool('fail')", ZeroReason.VERIFIER_ERROR),
        ("def verify(env): return env.call_tool('nothing')", ZeroReason.VERIFIER_ERROR),
        ("def verify(env, other): return 1", ZeroReason.VERIFIER_ERROR),
        ("import os\ndef verify(env): os._exit(0)", ZeroReason.VERIFIER_ERROR),
        ("def verify(env):\n    while True: pass", ZeroReason.VERIFIER_TIMEOUT),
        ("def verify(env): return float('nan')", ZeroReason.UNREADABLE_REWARD),
        ("def verify(env): return 10 ** 400", ZeroReason.UNREADABLE_REWARD),
        ("def verify(env): pass", ZeroReason.UNREADABLE_REWARD),
    ],
)
async def test_a_verifier_without_a_reward_gives_zero(
    server: str, tmp_path: Path, code: str, reason: ZeroReason
):
    options = f"{HIDDEN},verifier_timeout_s={0.5 if 'while' in code else 60}"
    result = await run_trial(server, ADD, "Done.", directory=tmp_path, row=task_row(code), options=options)
    assert isinstance(result, Trajectory) and (result.reward, result.zero_reason) == (0.0, reason)


@pytest.mark.parametrize("tool", ["die", "hang"])
async def test_a_server_that_fails_a_verifier_gives_no_reward(tmp_path: Path, tool: str):
    options = f"{HIDDEN},call_timeout_s=3"
    row = task_row(f"def verify(env): return env.call_tool('{tool}')")
    with mcp_server() as server:
        result = await run_trial(server, "Done.", directory=tmp_path, row=row, options=options)
    assert isinstance(result, TrialFailure) and result.kind is FailureKind.ENV_SERVER


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "open('/usr/file', 'w')",
        f"open({str(EXAMPLE)!r})",
        "__import__('socket').create_connection(('127.0.0.1', PORT))",
        "__import__('numpy')",
        "__import__('os').environ['PATH']",
        "bytearray(4 * 2**30)",
    ],
)
async def test_a_verifier_reaches_nothing_of_the_host(server: str, tmp_path: Path, attempt: str):
    line = attempt.replace("PORT", server.rpartition(":")[2])
    code = f"def verify(env):\n    try:\n        {line}\n    except Exception as error:\n        return 1\n"
    result = await run_trial(server, "Done.", directory=tmp_path, row=task_row(code))
    assert isinstance(result, Trajectory) and result.reward == 1.0


async def test_the_example_can_be_solved(tmp_path: Path):
    solutions = {
        "shop-restock": [ADD, "Done."],
        "shop-count": [call("get_stock", item="W2"), "There are 7 units."],
        "depot-new-item": [call("add_stock", item="P9", units=20), "Done."],
        "depot-total": ["13"],
    }
    with mcp_server(program="examples.fleet.inventory_server") as server:
        argv = [*OWN_SERVER, "env=fleet", f"test_data={EXAMPLE}"]
        argv += [f"environment_kwargs=url={server}/{{env_key}}/mcp,{HIDDEN}"]
        config = parse_as(EvaluateConfig, argv)
        source = await asyncio.to_thread(open_task_source, config.environment, byte_chat())
        for task in source.eval:
            policy = FakePolicy(byte_chat(), solutions.pop(task.id))
            trial = source.trial(task, directory=tmp_path, seed=1, temperature=1.0)
            result = await trial.run(policy)
            assert isinstance(result, Trajectory) and result.reward == 1.0, task.id
            assert await source.noop_reward(task) == 0.0
    assert solutions == {}


def test_a_server_that_is_down_gives_a_one_line_error(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ConfigError) as refused:
        opened(url, task_row(), directory=tmp_path)
    message = str(refused.value)
    assert message.startswith(f"env=fleet: the MCP server at {url}/shop/mcp cannot be reached (ConnectError")
    assert message.endswith("; start the server, or correct url=") and "\n" not in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("reset_tool=restart", "shop/mcp has no tool restart; its tools are get_stock, add_stock, reset"),
        ("verifier_tools=one+two", "has no tool one; its tools are"),
        ("speed=2", "env=fleet has no option speed; remove the option"),
        ("call_timeout_s=0", "call_timeout_s must be a number above 0"),
        ("max_result_chars=0.5", "max_result_chars must be an integer above 0, not '0.5'"),
        ("parallel_tool_calls=2", "parallel_tool_calls=2 is not one of false, true"),
    ],
)
def test_an_invalid_option_gives_a_one_line_error(server: str, tmp_path: Path, options: str, message: str):
    with pytest.raises(ConfigError, match=message):
        opened(server, task_row(), directory=tmp_path, options=options)


@pytest.mark.parametrize(
    ("env_key", "message"),
    [
        ("closed", r"is unavailable \(HTTP status 503"),
        ("a/../..", "env_key='a/../..' must begin with a letter"),
    ],
)
def test_an_unusable_server_gives_a_one_line_error(server: str, tmp_path: Path, env_key: str, message: str):
    with pytest.raises(ConfigError, match=message):
        opened(server, task_row(env_key=env_key), directory=tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["environment_kwargs=url=http://h"], "env=fleet needs train_data=FILE.jsonl"),
        (["train_data=t.jsonl"], "env=fleet needs environment_kwargs=url=http://host:port/mcp"),
        (
            ["tasks_dir=.", "environment_kwargs=url=http://h"],
            "tasks_dir is not for env=fleet; use train_data or test_data",
        ),
        (
            [f"train_data={EXAMPLE}", f"test_data={EXAMPLE}", "environment_kwargs=url=http://h"],
            r"held-out tasks are also training tasks: shop-restock \(and 3 more\)",
        ),
    ],
)
def test_a_missing_option_gives_a_one_line_error(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        open_task_source(parse([*OWN_SERVER, "env=fleet", *argv]), byte_chat())


def test_the_key_is_sent_to_the_server(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"denies access \(HTTP status 401.*\); set FLEET_API_KEY"):
        opened(server, task_row(env_key="locked"), directory=tmp_path)
    monkeypatch.setenv("FLEET_API_KEY", API_KEY)
    assert opened(server, task_row(env_key="locked"), directory=tmp_path).train


@pytest.mark.parametrize(("options", "num_warnings"), [("verifier_tools=export_stock", 1), (HIDDEN, 0)])
def test_shared_state_is_a_warning(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: str, num_warnings: int
):
    opened(server, task_row(env_key="stateless"), directory=tmp_path, options=options)
    assert [record.getMessage() for record in caplog.records] == [
        f"{server}/stateless/mcp gives its sessions no ids, so trials may share the state of the server; "
        "set reset_tool and n_parallel_envs=1"
    ] * num_warnings


def test_a_machine_without_a_sandbox_gives_a_one_line_error(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verifier, "sandbox_command", lambda seccomp: ["/bin/sh", "-c", "echo denied >&2"])
    with pytest.raises(
        ConfigError, match=r"cannot run verifiers here: .* did not start \(denied\); install bubblewrap"
    ):
        opened(server, task_row(), directory=tmp_path)


async def test_a_killed_verifier_is_an_infrastructure_failure(server: str, tmp_path: Path):
    row = task_row("import os\ndef verify(env): os.kill(os.getpid(), 9)")
    result = await run_trial(server, "Done.", directory=tmp_path, row=row)
    assert isinstance(result, TrialFailure) and result.kind is FailureKind.ENV_ERROR
    assert "the verifier was killed; the machine may lack memory" in result.message


async def test_a_killed_bubblewrap_is_no_fault_of_the_agent(monkeypatch: pytest.MonkeyPatch):
    async def call_tool(name: str, arguments: object) -> mcp_session.ToolResult:
        raise AssertionError

    script = """echo '{"ready": true}'; read -r _; kill -9 $$"""
    monkeypatch.setattr(verifier, "sandbox_command", lambda seccomp: ["/bin/sh", "-c", script])
    with pytest.raises(SandboxError, match="the verifier was killed; the machine may lack memory"):
        await verifier.verify(PROBE, "", call_tool, timeout_s=10)


async def test_a_verifier_cannot_call_tools_forever(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verifier, "MAX_CALLS", 3)
    row = task_row("def verify(env):\n    while True: env.call_tool('export_stock')")
    result = await run_trial(server, "Done.", directory=tmp_path, row=row)
    assert isinstance(result, Trajectory) and result.zero_reason is ZeroReason.VERIFIER_ERROR
