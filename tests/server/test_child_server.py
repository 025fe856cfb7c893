"""`serve` runs a server in a child process."""

import asyncio
import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path

import httpx
import jax.numpy as jnp
import pytest

from skyrl_tx_server import ServerConfig, serve
from skyrl_tx_server.config.command_line import parse
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.http import child_server
from skyrl_tx_server.http.child_server import MAX_LINE_BYTES, READY, arguments_of

TIMEOUT_S = 60
OPTIONS = {
    "base_model": "datasets/quickstart/model",
    "compilation_cache_dir": None,
    "max_num_seqs": 4,
    "port": 0,
    "yarn": True,
}


def test_the_child_parses_the_same_configuration() -> None:
    config = ServerConfig(**OPTIONS)
    assert parse(arguments_of(config)) == config


def test_api_keys_are_not_on_the_command_line() -> None:
    config = ServerConfig(**OPTIONS, api_key="tml-secret")
    assert not [argument for argument in arguments_of(config) if "secret" in argument]


async def test_an_invalid_model_gives_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JAX has started threads in this process. `serve` must not fork it, because Python would warn."""
    jnp.zeros(1).block_until_ready()
    config = ServerConfig(base_model=str(tmp_path), port=0, checkpoints_dir=str(tmp_path / "checkpoints"))
    with pytest.raises(ConfigError, match=r"^the server stopped with status 2: .*config\.json") as error:
        async with serve(config):
            pass
    assert "\n" not in str(error.value)


class OutputRecorder(io.StringIO):
    """Keeps the output of a child, and sets `ended` at the line `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def write(self, text: str) -> int:
        if text.rstrip() == "end":
            self.ended.set()
        return super().write(text)


async def test_long_lines_of_output_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "x" * (4 * MAX_LINE_BYTES)
    program = f"line = 'x' * {len(line)}\n"
    program += "print(line)\nprint('skyrl-tx server ready: http://child')\nprint(line)\nprint('end')\n"
    monkeypatch.setattr(child_server, "START", program)
    output = OutputRecorder()
    monkeypatch.setattr(sys, "stderr", output)
    async with asyncio.timeout(TIMEOUT_S), serve(ServerConfig(**OPTIONS)) as url:
        await output.ended.wait()
    assert url == "http://child"
    assert output.getvalue().split() == [line, line, "end"]


def test_the_server_stops_when_its_parent_is_killed(tmp_path: Path) -> None:
    options = f"base_model='datasets/quickstart/model', port=0, checkpoints_dir={str(tmp_path)!r}"
    program = (
        "import asyncio\nfrom skyrl_tx_server import ServerConfig, serve\n"
        f"async def main():\n    async with serve(ServerConfig({options})) as url:\n"
        "        print(url, flush=True)\n        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert httpx.get(f"{url}/api/v1/healthz", timeout=TIMEOUT_S).json() == {"status": "ok"}
        parent.kill()
    deadline = time.monotonic() + TIMEOUT_S
    with pytest.raises(httpx.ConnectError):
        while time.monotonic() < deadline:
            # The server may stop during a request.
            with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                httpx.get(f"{url}/api/v1/healthz", timeout=TIMEOUT_S)
            time.sleep(0.1)


def test_a_failed_engine_ends_the_server_with_an_error(tmp_path: Path) -> None:
    program = """
import sys
from skyrl_tx_server import __main__ as program
from skyrl_tx_server.engine.engine import Engine
def fail(*_):
    raise KeyError("a bug")
Engine._prefill = fail
sys.exit(program.main(sys.argv[1:]))
"""
    options = ("base_model=datasets/quickstart/model", "port=0", f"checkpoints_dir={tmp_path}")
    command = [sys.executable, "-c", program, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(ready[1] for line in server.stdout if (ready := READY.search(line)))
            body = {"model": "local/model", "prompt": "a", "max_tokens": 2}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
            _, output = server.communicate(timeout=TIMEOUT_S)
        finally:
            server.kill()
    reason = (
        "the engine failed (KeyError: 'a bug'); the log contains the traceback; start the server again and "
        "continue from a checkpoint in checkpoints_dir"
    )
    assert reply.status_code == 500 and reply.json()["error"]["message"] == reason
    assert server.returncode == 1 and output.splitlines()[-1] == f"skyrl-tx server: {reason}"


def test_importing_the_package_loads_neither_jax_nor_starlette() -> None:
    program = (
        "import sys, skyrl_tx_server as s; s.serve; print(sorted({'jax', 'starlette'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
