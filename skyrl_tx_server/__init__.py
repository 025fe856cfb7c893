"""A server for the Tinker API. `serve` runs a server in a child process for the duration of an `async with`
block.

`ServerConfig` and `serve` are imported on first use, so that importing a module of the package stays fast.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("chz") is None:
    raise SystemExit(
        "error: this Python lacks the packages of the server; run scripts/setup.sh, then `source "
        ".venv/bin/activate`, or use .venv/bin/python"
    )

if TYPE_CHECKING:
    from skyrl_tx_server.config.server_config import ServerConfig
    from skyrl_tx_server.http.child_server import serve

__all__ = ["ServerConfig", "serve"]


def __getattr__(name: str) -> object:
    if name == "ServerConfig":
        from skyrl_tx_server.config.server_config import ServerConfig

        return ServerConfig
    if name == "serve":
        from skyrl_tx_server.http.child_server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
