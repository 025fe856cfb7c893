"""python -m skyrl_tx_server base_model=DIR_OR_HUB_ID [key=value ...]: parse, open the port, load the model, serve, shut down.

The port is opened first, so that a port in use is known at once and early clients are told to wait (503) instead of being refused. Only
this module sees both the HTTP side and the engine's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from skyrl_tx_server.config.command_line import SECRETS, help_text, parse, print_help, with_secrets
from skyrl_tx_server.config.server_config import EngineSettings, HostsSettings, ServerConfig
from skyrl_tx_server.distributed.multihost import SINGLE_RANK, MultihostExecutor, RankLostError, RankZero
from skyrl_tx_server.engine.engine import STOPPING, Engine
from skyrl_tx_server.engine.futures import FutureStore, Retention
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.tenants import TenantKeys
from skyrl_tx_server.errors import ConfigError, ServerError
from skyrl_tx_server.external.sampling import ExternalSampling, ExternalSettings
from skyrl_tx_server.external.server import ExternalServer, ServerSettings, connect
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.access import access_policy
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.listening import BoundedServer, connection_limit, raise_file_limit

logger = logging.getLogger(__name__)

BACKLOG = 2048
POLLS_LET_GO_S = 5
FUTURES_SETTLE_S = 4  # of those five: the turn under way may be a long compilation
ENGINE_STOP_S = 15
SAMPLES_ELSEWHERE = (
    1024  # requests a client may have under way when another server has to make a batch of them
)
THREADS_PER_DEVICE = 4
KEEP_ALIVE_S = (
    120  # longer than any client's idle pool, so that no request meets a connection just being closed
)


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 after a requested stop, 2 for a mistake in the options or the model, 1 for a failure of ours."""
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(help_text())
        return 0
    try:
        config = parse(with_secrets(argv, os.environ))
    except ConfigError as error:
        return _fail(error, status=2)
    _set_up_logging(config)
    try:
        status = _run(config)
    except ConfigError as error:
        status = _fail(error, status=2)
    if config.num_processes > 1:
        _exit_now(status)  # jax would wait for the other processes first
    return status


def _run(config: ServerConfig) -> int:
    """What the options ask for: a plan, a server, or to follow the process that serves."""
    if config.dry_run:
        print(_dry_run(config))
        return 0
    hosts = config.hosts_settings()
    if hosts is not None and hosts.process_id > 0:
        return _follow(config, hosts)
    _tls_files(config)
    keys = None if config.api_keys_file is None else TenantKeys(Path(config.api_keys_file).expanduser())
    ledger = _open_ledger(config)
    with _open_port(config) as listener:
        return asyncio.run(_serve(config, ledger, keys, listener), loop_factory=uvloop.new_event_loop)


def _follow(config: ServerConfig, hosts: HostsSettings) -> int:
    from skyrl_tx_server.distributed.rendezvous import join
    from skyrl_tx_server.executor.executor import DeviceExecutor

    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # to go at once, as with SIGTERM, is what process 0 understands
    settings = _engine_settings(config)
    follower = join(hosts, settings, lambda reason: _exit_now(_fail(RankLostError(reason), status=1)))
    logger.info(
        "process %d of %d follows %s", hosts.process_id, hosts.num_processes, hosts.coordinator_address
    )
    try:
        follower.follow(lambda: DeviceExecutor(settings, follower))
    except RankLostError as error:
        return _fail(error, status=1)
    logger.info("stopped")
    return 0


def _fail(error: ServerError, *, status: int) -> int:
    print(f"skyrl-tx server: {error}", file=sys.stderr, flush=True)
    return status


def _dry_run(config: ServerConfig) -> str:
    """The memory plan. ConfigError when it does not fit."""
    from skyrl_tx_server.distributed.rendezvous import join, lead
    from skyrl_tx_server.executor.memory_plan import plan_memory

    settings, hosts = _engine_settings(config), config.hosts_settings()
    if hosts is not None:  # the devices are known only where all processes are there
        lead(hosts, settings, lambda _: None) if hosts.process_id == 0 else join(
            hosts, settings, lambda _: None
        )
    plan = plan_memory(settings)
    if not plan.fits:
        print(plan)
        raise ConfigError(f"this does not fit; lower {plan.advice()}")
    return f"{plan}\nit fits"


def _engine_settings(config: ServerConfig) -> EngineSettings:
    """With the model's directory, downloaded where need be."""
    from skyrl_tx_server.model.weights import resolve_model

    settings = config.engine_settings(resolve_model(config.base_model).resolve())
    if settings.mesh.devices > 1:
        # Of a CPU's virtual devices each one's message holds a thread until all have come to it, and they come to two that do not depend
        # on each other in any order: with XLA's usual threads, one for each device, they wait for ever, and XLA aborts after 40 s.
        os.environ.setdefault(
            "NPROC", str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * settings.mesh.devices))
        )
    return settings


@dataclass(kw_only=True, slots=True)
class _Loaded:
    """What loading brought: an engine, or why there is none."""

    engine: Engine | None = None
    leader: RankZero = SINGLE_RANK
    model_dir: Path | None = None
    error: Exception | None = None

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        self.leader.stop()


class _StoppableServer(BoundedServer):
    """A server with our own answer to SIGTERM and SIGINT: let go of the long polls, stop, exit 0; a second signal exits at once."""

    def __init__(self, config: uvicorn.Config, max_connections: int, stop: asyncio.Event) -> None:
        super().__init__(config, max_connections)
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._stop.set)


async def _serve(
    config: ServerConfig, ledger: RunIndex, keys: TenantKeys | None, listener: socket.socket
) -> int:
    if config.sampler_url is None:
        return await _serve_until_stopped(config, ledger, keys, listener, None)
    where = ServerSettings(
        url=config.sampler_url, timeout_s=config.sampler_timeout_s, api_key=config.sampler_api_key
    )
    async with connect(where, base_model=config.alias(), adapters=config.adapters_dir()) as sampler:
        return await _serve_until_stopped(config, ledger, keys, listener, sampler)


async def _serve_until_stopped(
    config: ServerConfig,
    ledger: RunIndex,
    keys: TenantKeys | None,
    listener: socket.socket,
    sampler: ExternalServer | None,
) -> int:
    tls = _tls_files(config)
    lobby, stop, loaded, lost = (
        StartupState(),
        asyncio.Event(),
        asyncio.Future[_Loaded](),
        asyncio.Future[str](),
    )
    server = _StoppableServer(
        uvicorn.Config(
            build_app(lobby),
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=POLLS_LET_GO_S,
            ws="none",
            ssl_certfile=tls and tls[0],
            ssl_keyfile=tls and str(tls[1]),
        ),
        connection_limit(config.max_connections, raise_file_limit()),
        stop,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loop = asyncio.get_running_loop()
    # A daemon thread: nothing can interrupt a model being loaded, and a stop must not wait for it.

    def on_lost(reason: str) -> None:
        loop.call_soon_threadsafe(lost.set_result, reason)

    def load() -> None:
        loop.call_soon_threadsafe(loaded.set_result, _load(config, on_lost))

    threading.Thread(target=load, name="load", daemon=True).start()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loaded, lost, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        server.should_exit = True
        await serving
        _exit_now(_fail(RankLostError(lost.result()), status=1) if lost.done() else 0)
    result = loaded.result()
    if result.engine is None:
        server.should_exit = True
        await serving
        assert result.error is not None
        result.stop()
        raise result.error
    context = _context(config, ledger, keys, result.engine, result.model_dir)
    if sampler is not None:
        context = replace(context, engine=_sampling_elsewhere(config, context, sampler))
    lobby.context = context
    print(_ready_line(config, result.engine, listener), flush=True)
    await asyncio.wait({lost, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        result.engine.abandon(lost.result())
        server.should_exit = True
        await serving
        _exit_now(_fail(RankLostError(lost.result()), status=1))
    logger.info("stopping")
    if isinstance(context.engine, ExternalSampling):
        await context.engine.close()
    stopper = threading.Thread(target=result.stop, daemon=True)
    stopper.start()
    # Every poll that waits is answered: with its result if the turn under way brings it, with an error otherwise.
    await asyncio.to_thread(stopper.join, FUTURES_SETTLE_S)
    if stopper.is_alive():
        result.engine.abandon(STOPPING)
    context.close()
    await serving
    stopper.join(ENGINE_STOP_S)
    logger.info("stopped")
    if stopper.is_alive():
        _exit_now(0)
    return 0


def _load(config: ServerConfig, on_lost: Callable[[str], None]) -> _Loaded:
    """Everything that needs jax, which takes seconds to import. Runs in its own thread."""
    leader = SINGLE_RANK
    try:
        from skyrl_tx_server.distributed.rendezvous import lead
        from skyrl_tx_server.engine.stop_strings import check_tokenizer
        from skyrl_tx_server.executor.executor import DeviceExecutor
        from skyrl_tx_server.executor.memory_plan import check_snapshots

        settings, hosts = _engine_settings(config), config.hosts_settings()
        check_tokenizer(settings.model_dir)
        if hosts is not None:
            leader = lead(hosts, settings, on_lost)
        check_snapshots(settings)
        executor = DeviceExecutor(settings, leader)
        engine = Engine(executor if hosts is None else MultihostExecutor(executor, leader))
        engine.start()
        return _Loaded(engine=engine, leader=leader, model_dir=settings.model_dir)
    except Exception as error:
        return _Loaded(error=error, leader=leader)


def _context(
    config: ServerConfig, ledger: RunIndex, keys: TenantKeys | None, engine: Engine, model_dir: Path | None
) -> AppState:
    return AppState(
        engine=engine,
        registry=Registry(session_timeout_s=config.session_timeout_s),
        futures=FutureStore(Retention()),
        checkpoints=CheckpointStore(Path(config.checkpoints_dir).expanduser(), config.alias()),
        ledger=ledger,
        settings=HttpSettings(
            model_dir=model_dir,
            max_request_bytes=config.max_request_mb << 20,
            api_key=config.api_key,
            access=access_policy(
                host=config.host,
                has_key=config.api_key is not None or config.api_keys_file is not None,
                allowed_hosts=config.allowed_hosts,
                allowed_origins=config.allowed_origins,
            ),
            tenant_keys=keys,
            tenant_quota=config.tenant_quota(),
            # Enough waiting samples to fill every slot the moment it frees, and no more polls than that needs.
            sample_max_concurrent_requests=max(64, 8 * config.decode_slots)
            if config.sampler_url is None
            else SAMPLES_ELSEWHERE,
        ),
    )


def _sampling_elsewhere(config: ServerConfig, context: AppState, sampler: ExternalServer) -> ExternalSampling:
    assert context.settings.model_dir is not None
    settings = ExternalSettings(
        adapters=config.adapters_dir(),
        max_adapters=config.max_snapshots,
        check=config.sampler_check,
        check_limit=config.sampler_check_limit,
        model_dir=context.settings.model_dir,
    )
    return ExternalSampling(context.engine, sampler, context.checkpoints, settings)


def _ready_line(config: ServerConfig, engine: Engine, listener: socket.socket) -> str:
    info = engine.info
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return (
        f"skyrl-tx server ready: {scheme}://{host}:{listener.getsockname()[1]}  model {info.base_model}  "
        f"context {info.max_context_length}  max_lora_rank {info.max_lora_rank}  decode_slots {engine.stats()['slots']}  "
        f"devices {info.devices}  checkpoints {config.checkpoints_dir}"
    )


def _open_ledger(config: ServerConfig) -> RunIndex:
    root = Path(config.checkpoints_dir).expanduser()
    try:
        return RunIndex(root / "ledger.jsonl")
    except OSError as error:
        raise ConfigError(
            f"checkpoints_dir={config.checkpoints_dir}: {error.strerror}; pass a directory this user can write to"
        ) from None


def _tls_files(config: ServerConfig) -> tuple[Path, Path] | None:
    """Certificate and key; None for plain http. ConfigError when they cannot be used."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    files = Path(config.ssl_certfile).expanduser(), Path(config.ssl_keyfile).expanduser()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={files[0]} ssl_keyfile={files[1]}: not a certificate and its key: {error}"
        ) from None
    return files


def _open_port(config: ServerConfig) -> socket.socket:
    """Bound and listening before the model is loaded. ConfigError when the address cannot be had."""
    where = f"host={config.host} port={config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{where}: {error.strerror}; stop what listens there, or pass another port="
        ) from None
    return listener


def _set_up_logging(config: ServerConfig) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("skyrl_tx_server").setLevel(config.log_level.upper())


def _hide_secrets() -> None:
    """Start this program again with the keys on its command line in the environment, where only this user can read them."""
    shown = [name for name in SECRETS if any(argument.startswith(f"{name}=") for argument in sys.argv[1:])]
    if not shown:
        return
    for name in shown:
        os.environ[SECRETS[name]] = [
            argument.partition("=")[2] for argument in sys.argv if argument.startswith(f"{name}=")
        ][-1]
        print(
            f"skyrl-tx server: {name}= was visible in the process list; set {SECRETS[name]} in the environment instead",
            file=sys.stderr,
            flush=True,
        )
    hidden = tuple(f"{name}=" for name in shown)
    os.execv(sys.executable, [argument for argument in sys.orig_argv if not argument.startswith(hidden)])


def _exit_now(status: int) -> None:
    """A thread is deep in a compilation or a download and cannot be asked to stop."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # Name the package's own logger, not "__main__", in every line.
    logger = logging.getLogger("skyrl_tx_server")
    _hide_secrets()
    sys.exit(main(sys.argv[1:]))
