"""Connections to a Tinker endpoint, which is Tinker's cloud or a server of your own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx
import tinker
from tinker.lib.base_url import DEFAULT_BASE_URL

from src.core.errors import BackendError, ConfigError, ServerLost
from src.core.options import is_http_address
from src.core.process import deadline, in_thread
from src.policy.checkpoint_check import check_checkpoint
from src.policy.options import AdapterOptions, BackendOptions
from src.policy.sampling_policy import Policy, ReferenceModel, TinkerPolicy, sdk_boundary
from src.policy.training_client import TrainingClient

logger = logging.getLogger(__name__)

# If heartbeat_timeout_s is smaller than one of the next two timeouts, the option replaces that timeout.
HEALTH_TIMEOUT_S = 5.0  # per request that is sent without the SDK, such as a health check
CLOSE_TIMEOUT_S = 5.0  # to close the session; the SDK alone would retry for minutes
DEFAULT_LORA_ALPHA = 32.0  # Tinker's alpha, which its API does not let clients choose
DUMMY_KEY = "tml-dummy"  # for the SDK, which requires a key; a server without keys ignores it
_KEY_PREFIXES = ("tml-", "eyJ")  # the SDK rejects a key with another prefix


class Backend(Protocol):
    """The operations of an endpoint that training uses."""

    @property
    def training_client(self) -> TrainingClient: ...

    async def policy(self, version: int) -> Policy:
        """Return a policy with a snapshot of the current weights."""
        ...

    async def reference_model(self, name: str | None = None) -> ReferenceModel:
        """Open the sampler checkpoint `name` (tinker://...) or the model `name`. None: the base model."""
        ...

    async def save(self, name: str) -> SavedPaths:
        """Save a training checkpoint and a sampler checkpoint."""
        ...

    async def check(self) -> None:
        """Run a health check.

        Raises BackendError if the endpoint does not answer in time, is not ready or has a server error, and
        ServerLost if it does not have the weights of this run.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPaths:
    """tinker:// paths of one checkpoint."""

    state_path: str  # weights and optimizer
    sampler_path: str  # weights only


class TinkerBackend:
    """A Tinker endpoint with one LoRA training client. Implements `Backend`.

    `key` is the result of `require_key`.
    """

    def __init__(
        self,
        service: tinker.ServiceClient,
        training_client: tinker.TrainingClient,
        options: BackendOptions,
        *,
        key: str | None,
        lora_alpha: float = DEFAULT_LORA_ALPHA,
    ) -> None:
        self.training_client = training_client
        self.lora_alpha = lora_alpha
        self._service = service
        self._options = options
        self._key = key

    async def policy(self, version: int) -> Policy:
        with sdk_boundary("preparing the weights for sampling"):
            return TinkerPolicy(await self.training_client.save_weights_and_get_sampling_client(), version)

    async def reference_model(self, name: str | None = None) -> ReferenceModel:
        with sdk_boundary(f"opening {name or 'the base model'}"):
            return await _open_policy(self._service, name or self._options.model_name)

    async def save(self, name: str) -> SavedPaths:
        with sdk_boundary(f"saving checkpoint {name}"):
            state = self.training_client.save_state(name, overwrite=True)
            sampler = self.training_client.save_weights_for_sampler(name)
            return SavedPaths(state_path=(await state).path, sampler_path=(await sampler).path)

    async def check(self) -> None:
        """Check the endpoint with plain HTTP requests, because the SDK would retry for minutes."""
        url, timeout_s = base_url(self._options), health_timeout_s(self._options)
        await check_alive(url, timeout_s=timeout_s)
        if self._key is None:  # only the SDK can read its stored credentials, which `get_info` would need
            return
        body = {"type": "get_info", "model_id": self.training_client.model_id}
        reply = await request(f"{url}/api/v1/get_info", key=self._key, body=body, timeout_s=timeout_s)
        if reply.status_code in (404, 410):
            raise ServerLost(
                f"the server at {url} does not have this run's weights; it was restarted or has ended the "
                "session"
            )


def require_key(options: BackendOptions) -> str | None:
    """Return the API key for the SDK, or None if the SDK is to use its stored credentials.

    With backend=skyrl-tx, DUMMY_KEY replaces a missing or invalid key. Raises ConfigError if the cloud is
    used with an invalid key, or with neither a key nor stored credentials.
    """
    key = os.environ.get("TINKER_API_KEY") or None
    if options.backend == "skyrl-tx":
        return key if key and key.startswith(_KEY_PREFIXES) else DUMMY_KEY
    if key and not key.startswith(_KEY_PREFIXES):
        raise ConfigError(
            "TINKER_API_KEY does not begin with tml-; copy the key again from the Tinker console"
        )
    if not key and not tinker.auth.tinker_has_credentials():
        raise ConfigError(
            "backend=tinker needs an API key: set TINKER_API_KEY (the environment or .env), or use "
            "backend=skyrl-tx"
        )
    return key


def base_url(options: BackendOptions) -> str:
    """Return the URL of the endpoint: that of the options, or else TINKER_BASE_URL or the SDK's default."""
    url = options.skyrl_tx_url if options.backend == "skyrl-tx" else options.tinker_base_url
    return (url or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")


def health_timeout_s(options: BackendOptions) -> float:
    return min(HEALTH_TIMEOUT_S, options.heartbeat_timeout_s)


async def check_alive(url: str, *, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
    """Raise BackendError within `timeout_s` unless a Tinker endpoint is ready at `url`."""
    if not is_http_address(url):
        raise BackendError(f"{url} is not an HTTP address; write http://host:port")
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=timeout_s) as client:
            reply = await client.get(f"{url}/api/v1/healthz")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        raise BackendError(
            f"no server answers at {url} ({type(error).__name__}); start it, or correct the address"
        ) from error
    if reply.status_code == 503:
        raise BackendError(f"the server at {url} is not ready yet; wait until it is ready")
    if reply.status_code != 200:
        raise BackendError(
            f"{url}/api/v1/healthz answered {reply.status_code}: the server has failed, or it is not a "
            "Tinker endpoint; start it again, or correct the address"
        )


async def request(url: str, *, key: str, body: Mapping[str, str] | None, timeout_s: float) -> httpx.Response:
    """Send a POST of `body`, or a GET if `body` is None, without the SDK.

    Raises BackendError for a status of 500 or above, or if the whole reply does not arrive within
    `timeout_s`.
    """
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout_s, headers={"X-API-Key": key}) as client,
        ):
            reply = await (client.get(url) if body is None else client.post(url, json=body))
    except (httpx.HTTPError, TimeoutError) as error:
        raise BackendError(
            f"{url} did not answer ({type(error).__name__}); check the server and its address"
        ) from error
    if reply.status_code >= 500:
        raise BackendError(f"{url} answered {reply.status_code}")
    return reply


async def lora_alpha(options: BackendOptions, *, model_id: str, key: str) -> float:
    """Return the LoRA alpha of a model: the value that the endpoint reports, or else Tinker's alpha.

    The SDK drops `lora_alpha` from the reply, so this function sends the request without the SDK.
    """
    url, body = f"{base_url(options)}/api/v1/get_info", {"type": "get_info", "model_id": model_id}
    reply = await request(url, key=key, body=body, timeout_s=health_timeout_s(options))
    try:
        return float(reply.json()["lora_alpha"])
    except (ValueError, KeyError, TypeError):
        return DEFAULT_LORA_ALPHA


async def check_model(options: BackendOptions, *, key: str | None) -> None:
    """Raise ConfigError unless the server serves the model with a context of at least `context_limit`.

    A context that the server does not report is not compared. `key` is the result of `require_key`. Raises
    BackendError if the server does not list its models.
    """
    action = f"listing the models of the server at {base_url(options)}"
    limit_s = options.heartbeat_timeout_s
    with sdk_boundary(action):
        async with deadline(
            limit_s, BackendError, f"{action}: no usable answer within heartbeat_timeout_s={limit_s:g}"
        ):
            client = await in_thread(lambda: tinker.RestClient(base_url=base_url(options), api_key=key))
            capabilities = await client.get_server_capabilities()
    served = {model.model_name: model for model in capabilities.supported_models if model.model_name}
    model = served.get(options.model_name)
    if model is None:
        names = ", ".join(sorted(served)) or "none"
        raise ConfigError(
            f"model_name={options.model_name} is not served at {base_url(options)}; it serves: {names}"
        )
    if model.max_context_length is not None and options.context_limit > model.max_context_length:
        limit = model.max_context_length
        alternative = "use backend=skyrl-tx"
        if options.backend == "skyrl-tx":
            alternative = f"start the server with max_context_length={options.context_limit} yarn=true"
        raise ConfigError(
            f"context_limit={options.context_limit} exceeds the server's {limit} tokens for "
            f"{options.model_name}; lower it, or {alternative}"
        )


async def _raise_if_server_lost(options: BackendOptions, error: Exception) -> None:
    """Raise ServerLost if the server does not answer or is not ready, which probably caused `error`."""
    if isinstance(error, ServerLost):
        return
    url = base_url(options)
    try:
        await check_alive(url, timeout_s=health_timeout_s(options))
    except BackendError as unreachable:
        raise ServerLost(f"{unreachable}, then resume (first error: {error})") from unreachable


async def _open_policy(service: tinker.ServiceClient, name: str) -> TinkerPolicy:
    """Open a policy with the sampler checkpoint `name` (tinker://...) or the base model `name`."""
    model_path, base_model = (name, None) if name.startswith("tinker://") else (None, name)
    open_client = lambda: service.create_sampling_client(model_path, base_model)  # noqa: E731
    return TinkerPolicy(await (await in_thread(open_client)), 0)


class TinkerEndpoint:
    """A connection to an endpoint that serves the model. It opens training clients and policies."""

    def __init__(self, service: tinker.ServiceClient, options: BackendOptions) -> None:
        self._service = service
        self._options = options

    async def open_training(self, adapter: AdapterOptions) -> TinkerBackend:
        """Open a training client with a new adapter, or with the adapter of `load_checkpoint_path`."""
        options, service = self._options, self._service
        path, rank = adapter.load_checkpoint_path, adapter.lora_rank
        # The calls of `service` open the session of the SDK and block, so they run in a thread.
        if path is not None:
            load = (
                service.create_training_client_from_state_with_optimizer
                if adapter.load_optimizer
                else service.create_training_client_from_state
            )
            with sdk_boundary(f"loading {path}"):
                rest_client = await in_thread(
                    lambda: tinker.RestClient(base_url=base_url(options), api_key=require_key(options))
                )
                await check_checkpoint(rest_client, path, adapter, model_name=options.model_name)
                client = await (await in_thread(lambda: load(path)))
        else:
            with sdk_boundary(f"creating an adapter of rank {rank} on {options.model_name}"):
                # The SDK's lora_config has no alpha. skyrl_tx_server reads the alpha from the metadata.
                alpha = adapter.lora_alpha
                metadata = None if alpha is None else {"lora_alpha": f"{alpha:g}"}
                client = await (
                    await in_thread(
                        lambda: service.create_lora_training_client(
                            options.model_name,
                            rank=rank,
                            seed=options.seed,
                            train_attn=adapter.train_attn,
                            train_mlp=adapter.train_mlp,
                            train_unembed=adapter.train_unembed,
                            user_metadata=metadata,
                        )
                    )
                )
        key = require_key(options)
        alpha = DEFAULT_LORA_ALPHA
        if adapter.lora_alpha is not None and key is not None:
            alpha = await lora_alpha(options, model_id=client.model_id, key=key)
        return TinkerBackend(service, client, options, key=key, lora_alpha=alpha)

    async def open_policy(self, sampler_path: str | None) -> Policy:
        """Open a sampler checkpoint, or the base model if `sampler_path` is None."""
        name = sampler_path or self._options.model_name
        with sdk_boundary(f"opening {name}"):
            return await _open_policy(self._service, name)

    async def check(self) -> None:
        """Raise BackendError if the endpoint does not answer in time, is not ready or has a server error."""
        url, key = base_url(self._options), require_key(self._options)
        timeout_s = health_timeout_s(self._options)
        await check_alive(url, timeout_s=timeout_s)
        if key is not None:  # None: the SDK does not expose its stored credentials, which a request needs
            await request(f"{url}/api/v1/get_server_capabilities", key=key, body=None, timeout_s=timeout_s)


@asynccontextmanager
async def connect(options: BackendOptions) -> AsyncGenerator[TinkerEndpoint]:
    """Connect to an endpoint that serves the model. The session ends with the `async with` block.

    If the block fails and the server does not answer or is not ready, the error becomes a ServerLost.
    """
    key = require_key(options)
    url = base_url(options)
    await check_alive(url, timeout_s=health_timeout_s(options))
    with sdk_boundary(f"connecting to {url}"):
        service = tinker.ServiceClient(base_url=url, api_key=key)
    status: Literal["success", "errored", "interrupted"] = "interrupted"
    try:
        await check_model(options, key=key)
        yield TinkerEndpoint(service, options)
        status = "success"
    except Exception as error:
        status = "errored"
        await _raise_if_server_lost(options, error)
        raise
    finally:
        # The context manager of the SDK would block the event loop for minutes if the server is dead.
        try:
            # `close` runs in a thread, because the SDK holds its lock while it opens a session.
            closing = in_thread(lambda: service.close(status).result())
            await asyncio.wait_for(closing, min(CLOSE_TIMEOUT_S, options.heartbeat_timeout_s))
        except (TimeoutError, tinker.TinkerError) as error:
            logger.warning(
                "the session at %s was not closed cleanly (%s); the server will end it",
                url,
                type(error).__name__,
            )
