"""Former names of options. They are accepted for one release, with a notice of one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Former `name` or `name=value` -> its present form. Delete the entries with the release after 0.1.
OPTION_ALIASES = {
    "max_length_stops": "max_consecutive_truncations",
    "task_sampling=signal": "task_sampling=thompson",
    "server_timeout_sec": "heartbeat_timeout_s",
    "answer_timeout_sec": "request_timeout_s",
    "trial_timeout_sec": "trial_timeout_s",
    "retry_wait_sec": "retry_wait_s",
    "reconnect_timeout_sec": "reconnect_timeout_s",
    "stop_timeout_sec": "stop_timeout_s",
}


def present_argument(argument: str) -> str:
    """Return the `name=value` argument with the present name of its option and the present form of its value.

    >>> [present_argument(text) for text in ("stop_timeout_sec=5", "task_sampling=signal", "seed=1")]
    ['stop_timeout_s=5', 'task_sampling=thompson', 'seed=1']
    """
    name, equals, value = argument.partition("=")
    return OPTION_ALIASES.get(argument, OPTION_ALIASES.get(name, name) + equals + value)


def present_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config.json with their present names and values. An earlier release may have
    written the file.

    >>> present_options({"task_sampling": "signal", "stop_timeout_sec": 5.0, "seed": 1})
    {'task_sampling': 'thompson', 'stop_timeout_s': 5.0, 'seed': 1}
    """
    present: dict[str, Any] = {}
    for name, value in options.items():
        alias = OPTION_ALIASES.get(f"{name}={value}")
        present[OPTION_ALIASES.get(name, name)] = value if alias is None else alias.partition("=")[2]
    return present
