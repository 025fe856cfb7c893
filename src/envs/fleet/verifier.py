"""Runs the verifier of a task of env=fleet in a separate sandbox. The verifier is a Python function of the
task. It calls the same tools of an MCP server as the agent.

The sandbox has no network, none of the trainer's environment variables, and read-only system directories. An
agent reaches neither the verifier's process nor its files: the verifier receives the final answer as text and
calls tools through the trainer.

If a verifier raises an exception, hangs or returns no finite number, the trial has the reward 0 and does not
count as an infrastructure failure, because the agent can cause each of these failures by the state and the
final answer that it leaves. The trial records which failure it was as its graded-zero reason (`ZeroReason`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from src.core.errors import AgentFault, SandboxError
from src.core.trajectory import Task, ZeroReason
from src.envs.fleet.mcp_session import ToolResult
from src.envs.sandbox.bubblewrap import START_TIMEOUT_S
from src.envs.sandbox.launch import USERLAND, as_descriptor
from src.envs.sandbox.system_calls import seccomp_filter

PROGRAM = Path(__file__).with_name("verifier_process.py")
MAX_LINE_BYTES = 8 * 2**20
MAX_CALLS = 1000
TMP_BYTES = 64 * 2**20
# Exit statuses of bubblewrap if the kernel killed the verifier or bubblewrap, for example for lack of memory.
KILLED = (128 + signal.SIGKILL, -signal.SIGKILL)

CallTool = Callable[[str, Mapping[str, object]], Awaitable[ToolResult]]


async def verify(task: Task, final_answer: str, call_tool: CallTool, *, timeout_s: float) -> float:
    """Run the verifier of `task` and return the reward. `timeout_s` limits the time of the verifier, without
    the time of its tool calls.

    Raises AgentFault if the verifier gives no reward, SandboxError if its process cannot start or is killed,
    and the errors of `call_tool`.
    """
    async with contextlib.AsyncExitStack() as stack:
        process = await _start(stack)
        fields = {name: value for name, value in task.row.items() if not name.startswith("verifier_")}
        request: Mapping[str, object] = {
            "code": task.row["verifier_code"],
            "function": task.row["verifier_function"],
            "task": fields,
            "final_answer": final_answer,
        }
        left_s = timeout_s
        for _ in range(MAX_CALLS + 1):
            started = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    reply = await _exchange(process, request)
            except TimeoutError as error:
                raise AgentFault(
                    ZeroReason.VERIFIER_TIMEOUT, f"the verifier did not end within {timeout_s:g} s"
                ) from error
            left_s -= time.monotonic() - started
            match reply:
                case {"reward": float() | int() as reward}:
                    return float(reward)
                case {"unreadable": str() as value}:
                    raise AgentFault(ZeroReason.UNREADABLE_REWARD, f"the verifier returned {value}")
                case {"raised": str() as problem}:
                    raise AgentFault(ZeroReason.VERIFIER_ERROR, f"the verifier raised {problem}")
                case {"call": str() as name, "arguments": dict() as arguments}:
                    result = await call_tool(name, arguments)
                    request = {"value": result.value, "text": result.text, "is_error": result.is_error}
                case _:
                    raise AgentFault(ZeroReason.VERIFIER_ERROR, "a tool call of the verifier is invalid")
        raise AgentFault(ZeroReason.VERIFIER_ERROR, f"the verifier made more than {MAX_CALLS} tool calls")


def sandbox_command(seccomp: int) -> list[str]:
    """Return the command line of the verifier's sandbox. `seccomp` is a descriptor of the seccomp filter."""
    interpreter, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    command = ["/usr/bin/bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    command += ["--setenv", "LANG", "C.UTF-8", "--seccomp", str(seccomp)]
    for directory in ("/usr", *(f"/{name}" for name in USERLAND if Path("/", name).exists()), prefix):
        command += ["--ro-bind", os.path.realpath(directory), directory]
    command += ["--dev", "/dev"]
    for directory in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", directory]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    return [*command, interpreter, "-I", "-S", "-B", "-c", PROGRAM.read_text()]


async def _start(stack: contextlib.AsyncExitStack) -> asyncio.subprocess.Process:
    """Start the verifier's process, and let `stack` kill this process when the stack is closed.

    Raises SandboxError if the process does not start.
    """
    seccomp = as_descriptor(seccomp_filter(max_shared_mapping=TMP_BYTES))
    try:
        process = await asyncio.create_subprocess_exec(
            *sandbox_command(seccomp),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(seccomp,),
            process_group=0,  # Ctrl-C at the terminal must reach the trainer only
            cwd="/",
            env={},
            limit=MAX_LINE_BYTES,
        )
    except OSError as error:
        raise SandboxError(
            f"the verifier needs bubblewrap ({error}); install the package bubblewrap"
        ) from error
    finally:
        os.close(seccomp)
    stack.push_async_callback(_end, process)
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
            if line != b'{"ready": true}\n':
                errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
                raise SandboxError(
                    f"the sandbox of the verifier did not start ({errors[-1] if errors else 'no message'}); "
                    "install bubblewrap and allow user namespaces for unprivileged users"
                )
    except TimeoutError as error:
        raise SandboxError(
            f"the sandbox of the verifier did not start within {START_TIMEOUT_S} s; lower n_parallel_envs"
        ) from error
    return process


async def _exchange(process: asyncio.subprocess.Process, request: Mapping[str, object]) -> object:
    """Send a message and return the reply.

    Raises AgentFault if the reply is invalid or the verifier ends without a reply, and SandboxError if the
    verifier was killed.
    """
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(ConnectionError):  # the process has ended; `readline` reports it
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    try:
        line = await process.stdout.readline()
        if line:
            return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AgentFault(ZeroReason.VERIFIER_ERROR, f"the verifier sent an invalid line: {error}") from error
    status = await process.wait()
    if status in KILLED:
        raise SandboxError("the verifier was killed; the machine may lack memory")
    raise AgentFault(ZeroReason.VERIFIER_ERROR, f"the verifier ended its process with status {status}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # Unlike `os.killpg`, `process.kill()` calls waitpid first. If the process had just ended, waitpid
            # would take its exit status, and the event loop could no longer read the status.
            os.killpg(process.pid, signal.SIGKILL)
    await process.communicate()
