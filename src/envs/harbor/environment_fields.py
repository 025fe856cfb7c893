"""The conversion of `environment_kwargs` to fields of Harbor's EnvironmentConfig."""

from __future__ import annotations

from collections.abc import Mapping

from src.core.errors import ConfigError


def environment_options(environment_kwargs: Mapping[str, str]) -> dict[str, object]:
    """Return `environment_kwargs` as fields of Harbor's EnvironmentConfig.

    These settings become fields: cpus, memory_mb, storage_mb and gpus (with or without `override_`),
    `override_tpu=TYPE=TOPOLOGY`, `extra_allowed_hosts=A+B`, `force_build`, `delete` and the enforcement
    policies. All other settings are passed to the environment class, even if EnvironmentConfig has a field of
    the same name.

    >>> environment_options({"override_cpus": "2", "memory_mb": "512", "network": "true"})
    {'kwargs': {'network': True}, 'override_cpus': 2, 'override_memory_mb': 512}
    """
    kwargs: dict[str, object] = {}
    options: dict[str, object] = {"kwargs": kwargs}
    for key, text in environment_kwargs.items():
        short = key.removeprefix("override_")
        if short in ("cpus", "memory_mb", "storage_mb", "gpus"):
            try:
                options[f"override_{short}"] = int(text)
            except ValueError:
                raise ConfigError(f"environment_kwargs {key} needs an integer, not {text!r}") from None
        elif key in ("force_build", "delete"):
            value = _parse_scalar(text)
            if not isinstance(value, bool):
                raise ConfigError(f"environment_kwargs {key} needs true or false, not {text!r}")
            options[key] = value
        elif key == "override_tpu":
            tpu_type, _, topology = text.partition("=")
            options[key] = {"type": tpu_type, "topology": topology}
        elif key == "extra_allowed_hosts":
            options[key] = text.split("+")
        elif key in ("cpu_enforcement_policy", "memory_enforcement_policy"):
            options[key] = text
        else:
            kwargs[key] = _parse_scalar(text)
    return options


def _parse_scalar(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
