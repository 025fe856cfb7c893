"""The HTTP server with a fake engine: its application state, and a loopback server in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from skyrl_tx_server.engine.futures import FutureStore, Retention
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from tests.fakes.engine import FakeEngine


def fake_context(
    root: Path,
    *,
    retention: Retention | None = None,
    session_timeout_s: float = 300.0,
    settings: HttpSettings | None = None,
) -> AppState:
    """Return an application state with a `FakeEngine` and checkpoints in `root`."""
    tenant_quota = None if settings is None or settings.tenant_keys is None else settings.tenant_quota
    store = CheckpointStore(root, "local/fake", tenant_quota=tenant_quota)
    return AppState(
        engine=FakeEngine(store),
        registry=Registry(session_timeout_s=session_timeout_s),
        futures=FutureStore(retention or Retention()),
        checkpoints=store,
        run_index=RunIndex(root / "ledger.jsonl"),
        settings=settings or HttpSettings(model_dir=None),
    )


def fake_engine(context: AppState) -> FakeEngine:
    assert isinstance(context.engine, FakeEngine)
    return context.engine


class LoopbackServer(uvicorn.Server):
    """A uvicorn server that sets the event `listening` when it accepts connections."""

    def __init__(self, app: ASGIApp, *, log_level: str = "error", grace_s: int = 1) -> None:
        config = uvicorn.Config(
            app,
            # With its default log_config, uvicorn closes the log handlers of other libraries, for example of
            # absl, and this closes the output of pytest.
            log_config=None,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=grace_s,
            ws="none",
        )
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def in_thread(self, listener: socket.socket) -> Iterator[None]:
        thread = threading.Thread(target=self.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert self.listening.wait(60)
            yield
        finally:
            self.should_exit = True
            thread.join()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that the kernel gives to no other process. A socket with SO_REUSEADDR can listen on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def serving(startup: StartupState, *, port: int = 0, housekeeping_period_s: float = 5.0) -> Iterator[str]:
    """Run the application under uvicorn in a thread and yield its URL. Port 0 selects a free port."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        app = build_app(startup, housekeeping_period_s=housekeeping_period_s)
        server = LoopbackServer(app)
        with server.in_thread(listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    if startup.state is not None and isinstance(startup.state.engine, FakeEngine):
        startup.state.engine.stop()
