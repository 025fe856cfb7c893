"""Checks of the values that the methods of a message environment return.

A wrong value is an error of the environment, which no answer of the agent can cause. The messages name the
class and the method of the environment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import cast


class NotAsyncError(TypeError):
    """A method of an environment is not async."""


def require_async(env: object, method: str, returned: object) -> None:
    """Raise NotAsyncError if a method of an environment has returned a value that cannot be awaited."""
    if not isinstance(returned, Awaitable):
        raise NotAsyncError(f"{method} of {type(env).__name__} is not async; write `async def {method}`")


def require_type(env: object, method: str, result: object, kind: type) -> None:
    """Raise TypeError if a method of an environment has returned another type than `kind`."""
    if not isinstance(result, kind):
        raise TypeError(
            f"{method} of {type(env).__name__} returned {type(result).__name__}, not {kind.__name__}"
        )


def require_messages(env: object, method: str, messages: Iterable[object]) -> None:
    """Raise TypeError if messages of an environment do not have the form of chat messages."""
    for message in messages:
        if not _is_message(message):
            raise TypeError(
                f"{method} of {type(env).__name__} returned the message {str(message)[:80]!r}; return "
                'messages of the form {"role": "user", "content": "TEXT"}'
            )


def metric_value(env: object, name: str, value: float) -> float:
    """Return a metric of a StepResult as a float. Raises TypeError if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"step of {type(env).__name__} returned the metric {name}={value!r}, which is not a number"
        ) from error


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    fields = cast(Mapping[object, object], message)
    has_content = isinstance(fields.get("content"), str | list) or bool(fields.get("tool_calls"))
    return isinstance(fields.get("role"), str) and has_content
