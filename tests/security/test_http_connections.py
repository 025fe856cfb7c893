"""Idle connections and a shortage of file descriptors do not block other clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from skyrl_tx_server.config.command_line import parse, with_secrets
from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.listening import BoundedServer, connection_limit, raise_file_limit
from tests.fakes.server import fake_context, fake_engine

type Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def serving(
    root: Path, *, max_connections: int = 8, head_timeout_s: float = 60.0
) -> AsyncIterator[tuple[str, int]]:
    """Serve a fake engine. Yield the address of the server."""
    context = fake_context(root)
    config = uvicorn.Config(
        build_app(StartupState(state=context)),
        log_config=None,  # for the reason, see tests.fakes.server.LoopbackServer
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = BoundedServer(config, max_connections, head_timeout_s=head_timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield address
        finally:
            server.should_exit = True
            await task
            fake_engine(context).stop()


async def is_healthy(address: tuple[str, int]) -> bool:
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=30) as http:
        return (await http.get("/api/v1/healthz")).status_code == 200


async def open_and_send(address: tuple[str, int], data: bytes = b"POST /api/v1/crea") -> Stream:
    """Open a connection and send `data`, by default the beginning of a request."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def received_until_close(stream: Stream) -> bytes:
    """Return the bytes that the server sent before it closed the connection."""
    try:
        async with asyncio.timeout(30):
            return await stream[0].read()
    except ConnectionError:
        return b""
    finally:
        stream[1].close()


async def test_half_open_connections_do_not_block_a_request(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connections=8) as address:
        streams = [await open_and_send(address) for _ in range(40)]
        assert await is_healthy(address)
        assert await received_until_close(streams[0]) == b"", (
            "the connection that has been idle longest is closed"
        )
        for _, writer in streams:
            writer.close()


async def test_connections_in_a_tls_handshake_do_not_stop_accepting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, max_connections=8) as address:
        loop, handshakes_end, starting = asyncio.get_running_loop(), asyncio.Event(), asyncio.Semaphore(0)

        async def handshake(*_args: object, **_options: object) -> None:
            starting.release()
            await handshakes_end.wait()
            raise ConnectionAbortedError("SSL handshake is taking longer than 20 seconds")

        with monkeypatch.context() as patch:
            patch.setattr(loop, "connect_accepted_socket", handshake)
            streams = [await open_and_send(address) for _ in range(8)]
            async with asyncio.timeout(30):
                for _ in range(8):
                    await starting.acquire()
            assert await received_until_close(await open_and_send(address)) == b"", (
                "a connection above the limit is closed"
            )
        handshakes_end.set()
        for stream in streams:
            await received_until_close(stream)
        assert await is_healthy(address)


async def test_a_connection_with_an_incomplete_head_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, head_timeout_s=0.1) as address:
        for partial_head in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: a\r\n"):
            assert await received_until_close(await open_and_send(address, partial_head)) == b""
        reused_connection = await open_and_send(address, b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"200 OK" in await reused_connection[0].readuntil(b"}")
        reused_connection[1].write(b"GET /")
        assert await received_until_close(reused_connection) == b""


async def test_the_head_timeout_does_not_apply_to_a_body(tmp_path: Path) -> None:
    async with serving(tmp_path, head_timeout_s=0.1) as address:
        headers = (
            b"host: a\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
        )
        stream = await open_and_send(address, b"POST /api/v1/create_session HTTP/1.1\r\n" + headers)
        await asyncio.sleep(0.3)  # longer than head_timeout_s
        stream[1].write(b"{}")
        assert b"session_id" in await received_until_close(stream)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(1000)),
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
        b"GET /" + b"a" * 200_000,
    ],
    ids=["many headers", "a long header", "a long url"],
)
async def test_the_size_of_a_head_is_limited(head: bytes, tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        reply = await received_until_close(await open_and_send(address, head + b"\r\n\r\n"))
        assert not reply or reply.startswith(b"HTTP/1.1 400")  # a connection reset can discard the reply
        assert await is_healthy(address)


async def test_the_server_survives_a_shortage_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as address:
        loop, failures = asyncio.get_running_loop(), [errno.EMFILE, errno.ENFILE, errno.ENOMEM]
        accept = loop.sock_accept

        async def accept_or_fail(listener: socket.socket) -> object:
            if failures:
                raise OSError(failures.pop(), "no descriptor")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", accept_or_fail)
        assert await is_healthy(address), "the call of sock_accept that is already waiting succeeds"
        assert await is_healthy(address)
        assert not failures


def test_the_open_file_limit_is_raised_and_limits_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(256, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (connection_limit(4096, 1 << 20), connection_limit(4096, 256)) == (4096, 128)
    with pytest.raises(ConfigError, match="raise it to 1024 or more"):
        connection_limit(4096, 130)


def test_the_api_key_is_read_from_environ_a_file_or_an_option(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("tml-from-file\n")
    environ = {"SKYRL_TX_API_KEY": "tml-from-environment"}
    for argv, key in (
        ([], "tml-from-environment"),
        ([f"api_key_file={file}"], "tml-from-file"),
        (["api_key=tml-given"], "tml-given"),
    ):
        assert parse(with_secrets(["base_model=x", *argv], environ)).api_key == key
    for content, message in ((b"", "empty"), (b"\xff", "not ASCII")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            with_secrets([f"api_key_file={file}"], {})
    with pytest.raises(ConfigError, match="pass one of them"):
        with_secrets([f"api_key_file={file}", "api_key=tml-a"], {})
    with pytest.raises(ConfigError, match="No such file"):
        with_secrets([f"api_key_file={tmp_path / 'none'}"], {})
    assert "tml-given" not in repr(parse(["base_model=x", "api_key=tml-given"]))


def test_a_key_argument_is_removed_from_the_process_list(tmp_path: Path) -> None:
    """The key file is a FIFO: the server waits until the test has read its command line."""
    fifo = tmp_path / "key"
    os.mkfifo(fifo)
    argv = [
        sys.executable,
        "-m",
        "skyrl_tx_server",
        "base_model=x",
        "sampler_api_key=secret-of-the-sampler",
        f"api_key_file={fifo}",
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as server:
        try:
            with fifo.open("wb") as writer:  # returns when the re-executed server opens the FIFO
                command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
                writer.write(b"wrong\n")
            _, stderr = server.communicate(timeout=60)
        finally:
            server.kill()
    assert b"base_model=x" in command_line and b"secret-of-the-sampler" not in command_line
    assert b"sampler_api_key= was visible" in stderr and b"secret-of" not in stderr and server.returncode == 2
