"""The program that runs a task's verifier in the verifier's sandbox. It imports the standard library only.

The program sends JSON lines to `src.envs.fleet.verifier` through stdout (->) and receives JSON lines through
stdin (<-):

    -> {"ready": true}
    <- {"code": ..., "function": ..., "task": {...}, "final_answer": ...}
    -> {"call": name, "arguments": {...}}           up to 1,000 times (MAX_CALLS)
    <- {"value": ..., "text": ..., "is_error": ...}
    -> {"reward": 1.0}, {"unreadable": "float nan"} or {"raised": "KeyError: 'W1'"}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
from collections.abc import Awaitable, Callable
from typing import Any

MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 16 * 2**20

Json = dict[str, Any]


class ToolError(Exception):
    """A tool returned an error."""


class Environment:
    """The argument `env` of a verifier: the task's fields, and the tools of the trial's session."""

    def __init__(self, task: Json, exchange: Callable[[Json], Json]) -> None:
        self.task = task
        self._exchange = exchange

    def call_tool(self, name: str, arguments: Json | None = None) -> Any:
        """Call a tool and return its structured result or, if it has none, its text.

        If this text is JSON, the parsed value is returned. The trainer has already parsed it
        (`mcp_session.tool_result`). Raises ToolError if the tool returned an error.
        """
        result = self._exchange({"call": name, "arguments": arguments or {}})
        if result["is_error"]:
            raise ToolError(result["text"])
        return result["value"]


async def finished(awaitable: Awaitable[object]) -> object:
    return await awaitable


def grade(request: Json, exchange: Callable[[Json], Json]) -> object:
    """Return the value that the verifier returns."""
    namespace: Json = {"__name__": "verifier", "ToolError": ToolError}
    exec(compile(request["code"], "verifier_code", "exec"), namespace)
    verify = namespace[request["function"]]
    parameters = inspect.signature(verify).parameters
    answer = {"final_answer": request["final_answer"]} if "final_answer" in parameters else {}
    value = verify(Environment(request["task"], exchange), **answer)
    return asyncio.run(finished(value)) if inspect.isawaitable(value) else value


def as_reply(value: object) -> Json:
    """Return the last message to the trainer for the value that the verifier returned."""
    if isinstance(value, (bool, int, float)):
        try:
            reward = float(value)
        except OverflowError:
            reward = math.inf
        if math.isfinite(reward):
            return {"reward": reward}
    return {"unreadable": f"{type(value).__name__} {value!r:.200}"}


def main() -> None:
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # output of the verifier must not mix with the replies
        os.dup2(null, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    def send(reply: Json) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    def exchange(call: Json) -> Json:
        send(call)
        return json.loads(requests.readline())

    send({"ready": True})
    request = json.loads(requests.readline())
    try:
        reply = as_reply(grade(request, exchange))
    except BaseException as error:
        reply = {"raised": f"{type(error).__name__}: {error!s:.200}"}
    send(reply)
    os._exit(0)  # does not wait for threads of the verifier


main()
