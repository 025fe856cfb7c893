"""A server with faulty responses, and a command that starts clients of this server as forks.

    python -m tests.fakes.unresponsive

A client is a program of this project, for example `src.train`. The command imports the modules of these
programs once and starts each program as a fork, which takes milliseconds. Each line of its input is a JSON
object with `module`, `argv` and `log`. The command prints `{"number": n, "pid": p}` when program n has
started and `{"number": n, "status": s}` when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from src.config import TrainerConfig
from src.core.trajectory import Trajectory
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy, SampleRequest
from tests.fakes.trials import FakeTasks, task, trajectory

# Paths that the SDK requests before it creates the training client
START = (
    "/healthz",
    "/client/config",
    "/client/dynamic_config",
    "/get_server_capabilities",
    "/create_session",
    "/session_heartbeat",
)


class Fault(StrEnum):
    """How the server handles a request that `is_bad` accepts."""

    HANGS = "hangs"
    FAILS = "answers 500"
    TRICKLES = "sends a byte per second"


class Unresponsive:
    """Wraps an ASGI application and applies `fault` to the requests whose path `is_bad` accepts.

    The first such request sets the event `reached`.
    """

    def __init__(self, app: Callable, fault: Fault, is_bad: Callable[[str], bool]) -> None:
        self.reached = threading.Event()
        self._app = app
        self._fault = fault
        self._is_bad = is_bad

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not self._is_bad(scope["path"].removeprefix("/api/v1")):
            await self._app(scope, receive, send)
            return
        self.reached.set()
        if self._fault is Fault.HANGS:
            await asyncio.Event().wait()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"100000" if self._fault is Fault.TRICKLES else b"2"),
        ]
        await send(
            {
                "type": "http.response.start",
                "status": 500 if self._fault is Fault.FAILS else 200,
                "headers": headers,
            }
        )
        while self._fault is Fault.TRICKLES:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(1)
        await send({"type": "http.response.body", "body": b"{}"})


@contextlib.contextmanager
def unresponsive(
    root: Path, fault: Fault, is_bad: Callable[[str], bool]
) -> Iterator[tuple[str, threading.Event]]:
    """Yield the URL of a server and the event that is set at the first bad request."""
    from skyrl_tx_server.http.app import build_app
    from skyrl_tx_server.http.http_handler import StartupState
    from tests.fakes.server import LoopbackServer, fake_context, fake_engine

    context = fake_context(root)
    engine = fake_engine(context)
    engine.info = replace(engine.info, max_context_length=4096)
    app = Unresponsive(build_app(StartupState(state=context)), fault, is_bad)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = LoopbackServer(app, log_level="critical", grace_s=0)
        with server.in_thread(listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.reached
    engine.stop()


def open_one_answer(config: TrainerConfig, chat: Chat) -> FakeTasks:
    """Return tasks whose trials have one turn. The reward of a trial is its seed modulo 2."""

    async def run_trial(trial, policy: Policy) -> Trajectory:
        turn = await policy.sample(
            SampleRequest(prompt_ids=[1, trial.seed % 50], max_tokens=2, temperature=1.0, seed=trial.seed)
        )
        return trajectory(trial.task.id, float(trial.seed % 2), [turn], name=f"{trial.task.id}-{trial.seed}")

    return FakeTasks(train=[task(f"t{number}") for number in range(4)], run_trial=run_trial)


def open_never(config: TrainerConfig, chat: Chat) -> FakeTasks:
    """Send a request that the server must not answer. Raises AssertionError if it answers."""
    with urllib.request.urlopen(f"{config.skyrl_tx_url}/opening") as reply:
        reply.read()
    raise AssertionError("the server answered")


def main() -> None:
    import src.evaluate.__main__
    import src.evaluate.probe.__main__
    import src.evaluate.run
    import src.loop.run
    import src.train
    from src.core.process import exit_process

    programs = {
        "train": src.train.main,
        "evaluate": src.evaluate.__main__.main,
        "probe": src.evaluate.probe.__main__.main,
    }
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    numbers: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(ended[1])
                os.write(1, (json.dumps({"number": numbers[ended[0]], "status": status}) + "\n").encode())

    signal.signal(signal.SIGCHLD, reap)
    for number, line in enumerate(sys.stdin):
        command = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            exit_process(programs[command["module"]](command["argv"]))
        numbers[pid] = number
        os.write(1, (json.dumps({"number": number, "pid": pid}) + "\n").encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    main()
