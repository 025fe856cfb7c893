"""The default backend and the default server address of `python -m src.envs.try_env`.

The public functions take a command line and return it with additional options that the user has not set.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from src.core.errors import BackendError, ConfigError
from src.policy.backend import check_alive, require_key
from src.policy.options import BackendOptions
from src.policy.served_model import values_of

LOCAL_SERVER = "http://localhost:8000"


def with_backend(argv: Sequence[str]) -> list[str]:
    """Add backend=skyrl-tx if the answers come from a model of a Tinker endpoint (`_has_model`), no option
    names a backend or an endpoint, and there is neither a valid key nor a stored credential for the Tinker
    cloud."""
    values = values_of(argv)
    if not _has_model(values) or values.keys() & {"backend", "skyrl_tx_url", "tinker_base_url"}:
        return list(argv)
    try:
        require_key(BackendOptions(model_name=values["model_name"]))
    except ConfigError:
        return [*argv, "backend=skyrl-tx"]
    return list(argv)


async def with_local_server(
    argv: Sequence[str], typed: Sequence[str], *, url: str = LOCAL_SERVER
) -> list[str]:
    """Add skyrl_tx_url=`url` if the answers come from a model of a Tinker endpoint and backend=skyrl-tx has
    no address.

    Raises ConfigError if no server is ready at `url`. The error message shows a command to type, which is
    made from `typed`: the user's arguments and the options of config files.
    """
    values = values_of(argv)
    if not _has_model(values) or values.get("backend") != "skyrl-tx" or "skyrl_tx_url" in values:
        return list(argv)
    added = f"skyrl_tx_url={url}"
    try:
        await check_alive(url)
    except BackendError as error:
        again = [*typed, *(word for word in ("backend=skyrl-tx", added) if word not in typed)]
        start = f"scripts/start_skyrl_tx.sh {shlex.quote(values['model_name'])}"
        cloud = "" if "backend" in values_of(typed) else "; for the Tinker cloud, set TINKER_API_KEY"
        raise ConfigError(
            f"no server is ready at {url}; start one with `{start}`, then type "
            f"`agent-trainer try {shlex.join(again)}`{cloud}"
        ) from error
    print(f"note: the server at {url} is used (backend=skyrl-tx {added})", file=sys.stderr)
    return [*argv, added]


def _has_model(values: dict[str, str]) -> bool:
    """Return whether the answers come from a model of a Tinker endpoint."""
    is_model = values.get("policy", "auto") in ("auto", "model") and "base_url" not in values
    return is_model and bool(values.get("model_name"))
