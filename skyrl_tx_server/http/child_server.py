"""A server in a child process, for Python programs: `async with serve(ServerConfig(...)) as url`."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import chz

from skyrl_tx_server.config.command_line import SECRETS
from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.errors import ConfigError, ServerError

ROOT = Path(__file__).resolve().parents[2]  # the directory that contains the package
READY = re.compile(r"skyrl-tx server ready: (\S+)")
STOP_TIMEOUT_S = 20.0
MAX_LINE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
START = """
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl({option}, {signal})
if os.getppid() != {parent}:
    sys.exit("the parent process has ended")
runpy.run_module("skyrl_tx_server", run_name="__main__", alter_sys=True)
"""
"""The program that the child process runs. It asks Linux to send SIGTERM to the child when the parent ends.
`preexec_fn` is not used, because it runs in a fork of this process, and a fork may deadlock if the process
has threads. JAX starts threads."""


@asynccontextmanager
async def serve(config: ServerConfig) -> AsyncGenerator[str]:
    """Run a server for the duration of an `async with` block. Yield its address, for example
    http://127.0.0.1:8000.

    The block starts when the model is loaded. The server is a child process. Its output is copied to
    standard error. The server also stops if this process is killed. Raises ConfigError if the server refuses
    its options or its model, and ServerError if the server stops for another reason before it is ready.
    """
    keys = {variable: getattr(config, name) for name, variable in SECRETS.items() if getattr(config, name)}
    import_path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        START.format(option=PR_SET_PDEATHSIG, signal=int(signal.SIGTERM), parent=os.getpid()),
        *arguments_of(config),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        limit=MAX_LINE_BYTES,
        env=os.environ | import_path | keys,
        start_new_session=True,  # Ctrl-C reaches only this process, so the block can still use the server
    )
    try:
        url = await _address(process)
        copy_task = asyncio.create_task(_copy_output(process))
        try:
            yield url
        finally:
            copy_task.cancel()
    finally:
        await _stop(process)


def arguments_of(config: ServerConfig) -> list[str]:
    """Return the command line of a configuration: `name=value` of each option that differs from its default.

    The API keys are left out, because other users can read the command line. `serve` passes the keys in the
    environment.
    """
    defaults = inspect.signature(ServerConfig).parameters
    values = {name: getattr(config, name) for name in chz.chz_fields(ServerConfig) if name not in SECRETS}
    return [f"{name}={value}" for name, value in values.items() if value != defaults[name].default]


async def _address(process: Process) -> str:
    """Return the address that the server prints when it is ready."""
    last_line = "no output"
    while line := await _next_line(process):
        text = line.rstrip()
        if ready := READY.search(text):
            return ready[1]
        print(line, end="", file=sys.stderr, flush=True)
        last_line = text or last_line
    status = await process.wait()
    kind = ConfigError if status == 2 else ServerError
    raise kind(f"the server stopped with status {status}: {last_line.removeprefix('skyrl-tx server: ')}")


async def _copy_output(process: Process) -> None:
    """Copy the output to standard error until it ends, because a full pipe would block the server."""
    while line := await _next_line(process):
        sys.stderr.write(line)


async def _next_line(process: Process) -> str:
    """Return the next line of the output with its line end, or "" if the output has ended. A line of more
    than MAX_LINE_BYTES is returned in parts."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        line = error.partial
    except asyncio.LimitOverrunError as error:
        line = await process.stdout.read(error.consumed)
    return line.decode(errors="replace")


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
