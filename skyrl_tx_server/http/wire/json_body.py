"""Parse JSON request bodies. Before a body is parsed, its depth and its numbers of values, strings and
containers are checked.

The first check also counts commas and brackets inside strings, so its counts are upper bounds. A body that
exceeds a limit in the first check is checked again without its strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import orjson

from skyrl_tx_server.errors import UserError

# The quantifiers are possessive, so that the time is linear for every input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonBounds:
    """Limits of a body."""

    values: int = 10_000  # counted as the number of commas in the whole body plus 1
    strings: int = 20_000  # names of members are strings as well
    containers: int = 10_000  # lists and objects
    depth: int = 32


CONTROL_BOUNDS = JsonBounds()
CHAT_BOUNDS = JsonBounds(values=1 << 20, strings=200_000, containers=100_000)
DATA_BOUNDS = JsonBounds(values=1 << 22, strings=200_000, containers=100_000)


def parse_json(body: bytes, bounds: JsonBounds = CONTROL_BOUNDS) -> object:
    """Return the value of a body, or {} if the body is empty. Raise UserError if the body is not JSON or
    exceeds `bounds`."""
    if not body:
        return {}
    if len(body) > bounds.depth:  # `depth` is the smallest bound, so a shorter body exceeds no bound
        _check(body, bounds)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not valid JSON: {error}") from None


def _check(body: bytes, bounds: JsonBounds) -> None:
    num_quotes = body.count(b'"') - body.count(b'\\"')  # at least the number of strings
    brackets = body.translate(None, _NOT_BRACKETS)
    if body.count(b",") < bounds.values and num_quotes <= bounds.strings and len(brackets) <= bounds.depth:
        return
    without_strings, num_strings = _STRING.subn(b"", body)
    if num_strings > bounds.strings:
        raise _exceeds("strings", bounds.strings)
    if without_strings.count(b",") >= bounds.values:
        raise _exceeds("values", bounds.values)
    steps = _STEPS[np.frombuffer(without_strings.translate(None, _NOT_BRACKETS), np.uint8)]
    if int((steps > 0).sum()) > bounds.containers:
        raise _exceeds("lists and objects", bounds.containers)
    if steps.size and int(np.cumsum(steps, dtype=np.int32).max()) > bounds.depth:
        raise UserError(
            f"the JSON body has more than {bounds.depth} levels of nested lists and objects, which is this "
            "route's limit; nest fewer levels"
        )


def _exceeds(unit: str, bound: int) -> UserError:
    return UserError(
        f"the JSON body has more than {bound} {unit}, which is this route's limit; send less in one request"
    )
