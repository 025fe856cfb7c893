"""The server program, `python -m skyrl_tx_server base_model=DIR_OR_HUB_ID [key=value ...]`.

The program opens the port before it loads the model, so that a port in use is reported at once and early
requests get the status 503 instead of a refused connection. Only this module imports both the HTTP side and
the JAX side.

This file is long because it contains all steps of the start and the shutdown, in order.
"""

from __future__ import annotations

import signal

from skyrl_tx_server.config.huge_pages import restart_with_huge_pages

if __name__ == "__main__":
    # Ctrl-C ends the process without a traceback unless uvicorn handles the signal, which stops the server.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    restart_with_huge_pages()  # before the imports below, because the restart would repeat them

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import chz
import uvicorn
import uvloop

from skyrl_tx_server.config.command_line import (
    help_text,
    help_words,
    move_secrets,
    parse,
    print_help,
    with_secrets,
)
from skyrl_tx_server.config.engine_options import DEFAULT_MAX_LORAS
from skyrl_tx_server.config.server_config import ServerConfig
from skyrl_tx_server.distributed.multihost import (
    SINGLE_RANK,
    MultihostExecutor,
    RankLostError,
    RankZero,
    WorkerRank,
)
from skyrl_tx_server.engine.engine import STOPPING, Engine
from skyrl_tx_server.engine.futures import FutureStore, Retention
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.tenants import TenantKeys
from skyrl_tx_server.errors import ConfigError, ServerError
from skyrl_tx_server.external.sampling import ExternalSampling
from skyrl_tx_server.external.server import ExternalServer, connect
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.access import access_policy
from skyrl_tx_server.http.app import build_app
from skyrl_tx_server.http.app_state import AppState, HttpSettings
from skyrl_tx_server.http.bodies import BodyReader
from skyrl_tx_server.http.http_handler import StartupState
from skyrl_tx_server.http.listening import StoppableServer, connection_limit, raise_file_limit
from skyrl_tx_server.http.sockets import open_socket, tls_files

logger = logging.getLogger(__name__)

GRACEFUL_SHUTDOWN_S = 5
FUTURES_SETTLE_S = 4
"""When the server stops, it waits at most this time for the current work of the engine, which may be a long
compilation. The time is shorter than `GRACEFUL_SHUTDOWN_S`, after which uvicorn cancels the open requests, so
that these requests still get a reply."""
ENGINE_STOP_S = 15
EXTERNAL_SAMPLE_REQUESTS = 1024
"""The number of sampling requests that a client may have open if an external sampler, which is a vLLM or
SGLang server, samples the completions."""
THREADS_PER_DEVICE = 4
KEEP_ALIVE_S = 120
"""The server closes a connection that is idle for this time. The time is longer than the idle timeout of
clients' connection pools, so that no client sends a request on a connection that the server is closing."""


def main(argv: Sequence[str]) -> int:
    """Run the program. Return the exit status: 0 after a requested stop, the help or a dry run, 2 for a
    mistake in the options or the model, 1 for a failure of the server."""
    if (words := help_words(argv)) is not None:
        print_help(help_text(words=words))
        return 0
    try:
        config = parse(with_secrets(argv, os.environ))
    except ConfigError as error:
        return _fail(error, status=2)
    _set_up_logging(config)
    try:
        return _run(config)
    except ConfigError as error:
        return _fail(error, status=2)


def _run(config: ServerConfig) -> int:
    """Depending on the options, print the memory plan, serve, or follow the process that serves (rank 0).
    Return the exit status."""
    if config.dry_run:
        print(_dry_run(config))
        return 0
    if config.process_id > 0:
        return _follow(config)
    tls_files(config)
    keys = None if config.api_keys_file is None else TenantKeys(Path(config.api_keys_file).expanduser())
    run_index = _open_run_index(config)
    with open_socket(config) as listener:
        return asyncio.run(_serve(config, run_index, keys, listener), loop_factory=uvloop.new_event_loop)


def _follow(config: ServerConfig) -> int:
    """Make the same calls as rank 0, the process that serves HTTP, until rank 0 stops. Return the exit
    status."""
    from skyrl_tx_server.distributed.rendezvous import join
    from skyrl_tx_server.executor.executor import DeviceExecutor

    config = _with_local_model(config)
    follower = join(config, config, _exit_lost)
    logger.info(
        "process %d of %d follows %s", config.process_id, config.num_processes, config.coordinator_address
    )
    try:
        follower.follow(lambda: DeviceExecutor(config, follower))
    except RankLostError as error:
        return _fail(error, status=1)
    logger.info("stopped")
    return 0


def _fail(error: ServerError, *, status: int) -> int:
    print(f"skyrl-tx server: {error}", file=sys.stderr, flush=True)
    return status


def _dry_run(config: ServerConfig) -> str:
    """Check the files of the model and return the text of the memory plan. If the model does not fit into
    memory, print the plan and raise ConfigError."""
    from skyrl_tx_server.distributed.rendezvous import join, lead
    from skyrl_tx_server.executor.memory_plan import plan_memory
    from skyrl_tx_server.model.config_json import load_model_config
    from skyrl_tx_server.model.weights import check_weights

    config = _with_local_model(config)
    check_weights(config.model_dir, load_model_config(config.model_dir))
    rank: RankZero | WorkerRank = SINGLE_RANK
    if config.num_processes > 1:  # jax lists all devices only after all processes have connected
        rank = (
            lead(config, config, lambda _: None)
            if config.process_id == 0
            else join(config, config, _exit_lost)
        )
    try:
        plan = plan_memory(config)
    finally:
        # Let all processes exit at about the same time. If one exits too early, for example 100 s before
        # process 0, jax aborts the others.
        rank.broadcast_from_rank0(lambda: None)
        if isinstance(rank, RankZero):
            rank.wait_for_exit()
    if not plan.fits:
        print(plan)
        raise ConfigError(
            f"the model does not fit into memory; reduce its largest parts with {plan.advice()}"
        )
    return f"{plan}\nthe model fits into memory"


def _with_local_model(config: ServerConfig) -> ServerConfig:
    """Set XLA's environment variables, download or convert the model if necessary, and check its tokenizer.
    Return the options with the model's local directory as `base_model`, and with `model_alias` set."""
    from skyrl_tx_server.files.base_model import check_tokenizer
    from skyrl_tx_server.model.config_json import load_model_config
    from skyrl_tx_server.model.weights import resolve_model

    if config.mesh.devices > 1:
        # Each virtual CPU device that waits in a collective blocks a thread, and devices may join two
        # independent collectives in different orders. With one thread per device, which XLA may start by
        # default, the collectives can deadlock, and XLA aborts after 40 s. NPROC sets the number of threads.
        os.environ.setdefault(
            "NPROC", str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * config.mesh.devices))
        )
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    model_dir = resolve_model(config.base_model).resolve()
    check_tokenizer(model_dir, load_model_config(model_dir).vocab_size)
    return chz.replace(config, base_model=str(model_dir), model_alias=config.alias)


@dataclass(kw_only=True, slots=True)
class _LoadResult:
    """The result of loading the model: an engine, or the error that occurred."""

    engine: Engine | None = None
    rank_zero: RankZero = SINGLE_RANK
    model_dir: Path | None = None
    error: Exception | None = None

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        self.rank_zero.stop()


async def _serve(
    config: ServerConfig, run_index: RunIndex, keys: TenantKeys | None, listener: socket.socket
) -> int:
    if config.sampler_url is None:
        return await _serve_until_stopped(config, run_index, keys, listener, None)
    async with connect(config, base_model=config.alias, adapters=config.adapters_dir) as sampler:
        return await _serve_until_stopped(config, run_index, keys, listener, sampler)


async def _serve_until_stopped(
    config: ServerConfig,
    run_index: RunIndex,
    keys: TenantKeys | None,
    listener: socket.socket,
    sampler: ExternalServer | None,
) -> int:
    """Serve until a stop is requested, and return the exit status 0. Exit the process if a rank is lost, if
    the engine fails, if a stop is requested before the model is loaded, or if the engine does not stop in
    time. If the model cannot be loaded, raise the error of the load."""
    loop, startup, stop = asyncio.get_running_loop(), StartupState(), asyncio.Event()
    loaded, lost = asyncio.Future[_LoadResult](), asyncio.Future[str]()
    server = _http_server(config, startup, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))

    def on_lost(reason: str) -> None:
        loop.call_soon_threadsafe(lambda: lost.done() or lost.set_result(reason))

    def load() -> None:
        loop.call_soon_threadsafe(loaded.set_result, _load(config, on_lost))

    # The thread is a daemon, because loading cannot be interrupted and a stop must not wait for it.
    threading.Thread(target=load, name="load", daemon=True).start()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loaded, lost, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        if stopping.done():
            logger.info("stopping before the model is loaded")
        server.should_exit = True
        await serving
        _exit_now(_fail(ServerError(lost.result()), status=1) if lost.done() else 0)
    result = loaded.result()
    if result.engine is None:
        server.should_exit = True
        await serving
        assert result.error is not None
        result.stop()
        raise result.error
    state = _app_state(config, run_index, keys, result.engine, result.model_dir)
    if sampler is not None:
        state = replace(state, engine=_external_sampling(config, state, sampler))
    startup.begin(state)
    try:
        print(_ready_line(config, result.engine, listener), flush=True)
    except OSError as error:  # for example a full disk; the server does not need its standard output
        logger.warning("standard output cannot be written: %s", error.strerror)
    await asyncio.wait({lost, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        result.engine.abandon(lost.result())
        server.should_exit = True
        await serving
        _exit_now(_fail(ServerError(lost.result()), status=1))
    logger.info("stopping")
    if isinstance(state.engine, ExternalSampling):
        await state.engine.close()
    stopper = threading.Thread(target=result.stop, daemon=True)
    stopper.start()
    # Wait at most FUTURES_SETTLE_S for the current work of the engine. Then fail all pending operations.
    await asyncio.to_thread(stopper.join, FUTURES_SETTLE_S)
    if stopper.is_alive():
        result.engine.abandon(STOPPING)
    state.close()
    await serving
    stopper.join(ENGINE_STOP_S)
    logger.info("stopped")
    if stopper.is_alive():
        _exit_now(0)
    return 0


def _http_server(config: ServerConfig, startup: StartupState, stop: asyncio.Event) -> StoppableServer:
    certificate, key = tls_files(config) or (None, None)
    options = uvicorn.Config(
        build_app(startup),
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        ws="none",
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
    )
    return StoppableServer(options, connection_limit(config.max_connections, raise_file_limit()), stop)


def _load(config: ServerConfig, on_lost: Callable[[str], None]) -> _LoadResult:
    """Load the model and start the engine. Runs in its own thread, because it may block for minutes."""
    rank_zero = SINGLE_RANK
    try:
        from skyrl_tx_server.distributed.rendezvous import lead
        from skyrl_tx_server.executor.executor import DeviceExecutor
        from skyrl_tx_server.executor.memory_plan import check_snapshots

        config = _with_local_model(config)
        if config.num_processes > 1:
            rank_zero = lead(config, config, on_lost)
        check_snapshots(config)
        CheckpointStore(config.checkpoints_path, config.alias).remove_interrupted_writes()
        executor = DeviceExecutor(config, rank_zero)
        engine = Engine(
            executor if config.num_processes == 1 else MultihostExecutor(executor, rank_zero),
            train_share=config.train_share,
            on_failure=on_lost,
        )
        engine.start()
        return _LoadResult(engine=engine, rank_zero=rank_zero, model_dir=config.model_dir)
    except Exception as error:
        return _LoadResult(error=error, rank_zero=rank_zero)


def _app_state(
    config: ServerConfig,
    run_index: RunIndex,
    keys: TenantKeys | None,
    engine: Engine,
    model_dir: Path | None,
) -> AppState:
    sample_requests = EXTERNAL_SAMPLE_REQUESTS
    if config.sampler_url is None:
        # With 8 requests per slot, a free slot is filled at once. More requests only cause more polls.
        slots = engine.stats()["slots"]
        assert isinstance(slots, int)
        sample_requests = max(64, 8 * slots)
    return AppState(
        engine=engine,
        registry=Registry(session_timeout_s=config.session_timeout_s),
        futures=FutureStore(Retention()),
        checkpoints=CheckpointStore(config.checkpoints_path, config.alias),
        run_index=run_index,
        bodies=BodyReader(max_bytes=config.max_request_mb << 20),
        settings=HttpSettings(
            model_dir=model_dir,
            api_key=config.api_key,
            access=access_policy(
                host=config.host,
                has_key=config.has_api_key,
                allowed_hosts=config.allowed_hosts,
                allowed_origins=config.allowed_origins,
            ),
            tenant_keys=keys,
            tenant_quota=config,
            max_connections=connection_limit(config.max_connections, raise_file_limit()),
            sample_max_concurrent_requests=sample_requests,
        ),
    )


def _external_sampling(config: ServerConfig, state: AppState, sampler: ExternalServer) -> ExternalSampling:
    assert state.settings.model_dir is not None
    return ExternalSampling(
        state.engine,
        sampler,
        state.checkpoints,
        config,
        adapters=config.adapters_dir,
        max_adapters=config.max_loras or DEFAULT_MAX_LORAS,
        model_dir=state.settings.model_dir,
    )


def _ready_line(config: ServerConfig, engine: Engine, listener: socket.socket) -> str:
    info = engine.info
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return (
        f"skyrl-tx server ready: {scheme}://{host}:{listener.getsockname()[1]}  model {info.base_model}  "
        f"context {info.max_context_length}  max_lora_rank {info.max_lora_rank}  max_num_seqs "
        f"{engine.stats()['slots']}  "
        f"devices {info.devices}  checkpoints {config.checkpoints_dir}"
    )


def _open_run_index(config: ServerConfig) -> RunIndex:
    try:
        return RunIndex(config.checkpoints_path / "ledger.jsonl")
    except OSError as error:
        raise ConfigError(
            f"checkpoints_dir={config.checkpoints_dir}: {error.strerror}; pass a writable directory"
        ) from None


def _set_up_logging(config: ServerConfig) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("skyrl_tx_server").setLevel(config.log_level.upper())


def _exit_lost(reason: str) -> None:
    _exit_now(_fail(RankLostError(reason), status=1))


def _exit_now(status: int) -> None:
    """Exit without waiting for threads, which may be in a compilation or a download that cannot be
    interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    logger = logging.getLogger("skyrl_tx_server")  # instead of "__main__"
    move_secrets()
    # A normal exit would wait for compilations in other threads and for the other processes of the server.
    _exit_now(main(sys.argv[1:]))
