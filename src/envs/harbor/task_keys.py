"""The keys of task.toml that Harbor ignores, for example because their names are misspelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from harbor.models.task.config import TaskConfig
from pydantic import BaseModel

FORMER_KEYS = {"version", "environment.memory", "environment.storage"}  # Harbor still reads them.


def ignored_keys(values: Mapping[str, object], config: TaskConfig) -> list[str]:
    """Return one warning for each key that Harbor ignores. `values` is the content of task.toml, and `config`
    is what Harbor reads from it.

    >>> ignored_keys({"agent": {"timeout": 9}, "metadata": {"author": "me"}}, TaskConfig())
    ['Harbor ignores agent.timeout in task.toml; did you mean agent.timeout_sec?']
    """
    return [
        f"Harbor ignores {section}{key} in task.toml"
        + (f"; did you mean {section}{close[0]}?" if (close := get_close_matches(key, fields, 1)) else "")
        for section, key, fields in _unknown(values, config, section="")
        if section + key not in FORMER_KEYS
    ]


def _unknown(
    values: Mapping[str, object], model: BaseModel, *, section: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the section, the name and the possible names of each key that is not a field of `model`."""
    fields = type(model).model_fields
    for key, value in values.items():
        if key not in fields:
            yield section, key, list(fields)
        elif isinstance(value, Mapping) and isinstance(child := getattr(model, key), BaseModel):
            yield from _unknown(value, child, section=f"{section}{key}.")
