"""The only file that knows Tinker's cloud from a server of your own: connect, check, train, sample, save."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx
import tinker
from tinker.lib.base_url import DEFAULT_BASE_URL

from src.core.errors import BackendError, ConfigError, ServerLost
from src.core.process import deadline, in_thread
from src.policy.options import BackendSettings
from src.policy.sampling_policy import Policy, ReferenceModel, TinkerPolicy, sdk_boundary

logger = logging.getLogger(__name__)

# Both are shorter where heartbeat_timeout_s is.
HEALTH_TIMEOUT_S = 5.0  # of one request that is sent by hand
CLOSE_TIMEOUT_S = 5.0  # the SDK would try a dead server for minutes
DUMMY_KEY = "tml-dummy"  # the SDK refuses to start without a key of this form; our server takes any
_KEY_FORMS = ("tml-", "eyJ")


class Backend(Protocol):
    """What training needs of an endpoint."""

    training_client: tinker.TrainingClient

    async def policy(self, version: int) -> Policy:
        """The current weights, frozen."""
        ...

    async def reference_model(self) -> ReferenceModel:
        """The base model without the adapter."""
        ...

    async def save(self, name: str) -> SavedPaths:
        """A checkpoint to resume from and one to sample from."""
        ...

    async def check(self) -> None:
        """BackendError within seconds when the endpoint does not answer, ServerLost when it does and no longer knows our weights."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPaths:
    """tinker:// paths of one checkpoint."""

    state_path: str  # weights and optimizer
    sampler_path: str  # weights only


class TinkerBackend:
    """A Tinker endpoint with one LoRA training client."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        training_client: tinker.TrainingClient,
        settings: BackendSettings,
        *,
        key: str | None,
    ) -> None:
        self.training_client = training_client
        self._service = service
        self._settings = settings
        self._key = key

    async def policy(self, version: int) -> Policy:
        with sdk_boundary("preparing the weights for sampling"):
            return TinkerPolicy(await self.training_client.save_weights_and_get_sampling_client(), version)

    async def reference_model(self) -> ReferenceModel:
        with sdk_boundary("opening the base model"):
            name = self._settings.model_name
            return TinkerPolicy(
                await (await in_thread(lambda: self._service.create_sampling_client(base_model=name))), 0
            )

    async def save(self, name: str) -> SavedPaths:
        with sdk_boundary(f"saving checkpoint {name}"):
            state = self.training_client.save_state(name, overwrite=True)
            sampler = self.training_client.save_weights_for_sampler(name)
            return SavedPaths(state_path=(await state).path, sampler_path=(await sampler).path)

    async def check(self) -> None:
        """Asks by hand, since the SDK would try again for minutes."""
        url, timeout_s = address(self._settings), health_timeout_s(self._settings)
        await check_alive(url, timeout_s=timeout_s)
        if self._key is None:  # the SDK's stored credentials are its own
            return
        request = {"type": "get_info", "model_id": self.training_client.model_id}
        status = await asked(f"{url}/api/v1/get_info", key=self._key, request=request, timeout_s=timeout_s)
        if status in (404, 410):
            raise ServerLost(
                f"the server at {url} no longer knows this run's weights; it was restarted, or ended the session"
            )


def require_key(settings: BackendSettings) -> str | None:
    """The API key to pass to the SDK; None lets it use its stored credentials. ConfigError when the cloud has no key at all."""
    key = os.environ.get("TINKER_API_KEY") or None
    if settings.backend == "skyrl-tx":
        return key if key and key.startswith(_KEY_FORMS) else DUMMY_KEY
    if key and not key.startswith(_KEY_FORMS):
        raise ConfigError(
            "TINKER_API_KEY does not begin with tml-; copy the key again from the Tinker console"
        )
    if not key and not tinker.auth.tinker_has_credentials():
        raise ConfigError(
            "backend=tinker needs an API key: set TINKER_API_KEY (the environment or .env), or use backend=skyrl-tx"
        )
    return key


def address(settings: BackendSettings) -> str:
    url = settings.skyrl_tx_url if settings.backend == "skyrl-tx" else settings.tinker_base_url
    return (url or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")


def health_timeout_s(settings: BackendSettings) -> float:
    return min(HEALTH_TIMEOUT_S, settings.heartbeat_timeout_s)


async def check_alive(url: str, *, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
    """BackendError within a few seconds unless a Tinker endpoint answers at `url`."""
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=timeout_s) as client:
            reply = await client.get(f"{url}/api/v1/healthz")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        raise BackendError(
            f"no server answers at {url} ({type(error).__name__}); start it, or correct the address"
        ) from error
    if reply.status_code == 503:
        raise BackendError(f"the server at {url} is not ready yet; try again once it is")
    if reply.status_code != 200:
        raise BackendError(
            f"{url}/api/v1/healthz answered {reply.status_code}, so this is no Tinker endpoint; correct the address"
        )


async def asked(url: str, *, key: str, request: Mapping[str, str] | None, timeout_s: float) -> int:
    """The status of one request, a POST of `request` or a GET. BackendError unless the server answers in time and without an error of
    its own. The timeout bounds the whole answer, so that a server that sends a byte now and then is not waited for."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout_s, headers={"X-API-Key": key}) as client,
        ):
            reply = await (client.get(url) if request is None else client.post(url, json=request))
    except (httpx.HTTPError, TimeoutError) as error:
        raise BackendError(f"{url} did not answer ({type(error).__name__})") from error
    if reply.status_code >= 500:
        raise BackendError(f"{url} answered {reply.status_code}")
    return reply.status_code


async def check_model(settings: BackendSettings, *, key: str | None) -> None:
    """ConfigError unless the server serves the model with the context asked for."""
    what, limit_s = f"asking the server at {address(settings)} for its models", settings.heartbeat_timeout_s
    with sdk_boundary(what):
        async with deadline(
            limit_s, BackendError, f"{what}: no usable answer within heartbeat_timeout_s={limit_s:g}"
        ):
            client = await in_thread(lambda: tinker.RestClient(base_url=address(settings), api_key=key))
            capabilities = await client.get_server_capabilities()
    served = {model.model_name: model for model in capabilities.supported_models if model.model_name}
    model = served.get(settings.model_name)
    if model is None:
        names = ", ".join(sorted(served)) or "none"
        raise ConfigError(
            f"model_name={settings.model_name} is not served at {address(settings)}; it serves: {names}"
        )
    if model.max_context_length is not None and settings.context_limit > model.max_context_length:
        limit = model.max_context_length
        raise ConfigError(
            f"context_limit={settings.context_limit} is above the server's {limit} for {settings.model_name}; lower it"
        )


async def _blame_a_dead_server(settings: BackendSettings, error: Exception) -> None:
    """Whatever a run died of, a server that is gone is the likelier cause."""
    if isinstance(error, ServerLost):
        return
    url = address(settings)
    try:
        await check_alive(url, timeout_s=health_timeout_s(settings))
    except BackendError as gone:
        raise ServerLost(
            f"the server at {url} no longer answers; start it again and resume (seen first: {error})"
        ) from gone


class TinkerEndpoint:
    """A checked connection, before anything was made on the server."""

    def __init__(self, service: tinker.ServiceClient, settings: BackendSettings) -> None:
        self._service = service
        self._settings = settings

    async def open_training(self) -> TinkerBackend:
        """A training client: a fresh adapter, or the one of the checkpoint to load, optimizer included."""
        settings, service = self._settings, self._service
        path, model_name = settings.load_checkpoint_path, settings.model_name
        # The SDK opens its session in these calls, and blocks its caller meanwhile.
        if path is not None:
            with sdk_boundary(f"loading {path}"):
                client = await (
                    await in_thread(lambda: service.create_training_client_from_state_with_optimizer(path))
                )
        else:
            with sdk_boundary(f"creating an adapter of rank {settings.lora_rank} on {model_name}"):
                rank, seed = settings.lora_rank, settings.seed
                client = await (
                    await in_thread(
                        lambda: service.create_lora_training_client(model_name, rank=rank, seed=seed)
                    )
                )
        return TinkerBackend(service, client, settings, key=require_key(settings))

    async def open_policy(self, sampler_path: str | None) -> Policy:
        """A saved sampler checkpoint, or the base model. Nothing is trained."""
        service, base_model = self._service, self._settings.model_name
        with sdk_boundary(f"opening {sampler_path or base_model}"):
            if sampler_path is not None:
                return TinkerPolicy(
                    await (await in_thread(lambda: service.create_sampling_client(model_path=sampler_path))),
                    0,
                )
            return TinkerPolicy(
                await (await in_thread(lambda: service.create_sampling_client(base_model=base_model))), 0
            )

    async def check(self) -> None:
        """BackendError within seconds when the endpoint does not answer, or only with errors of its own."""
        url, timeout_s, key = (
            address(self._settings),
            health_timeout_s(self._settings),
            require_key(self._settings),
        )
        await check_alive(url, timeout_s=timeout_s)
        if key is not None:  # the SDK's stored credentials are its own
            await asked(f"{url}/api/v1/get_server_capabilities", key=key, request=None, timeout_s=timeout_s)


@asynccontextmanager
async def connect(settings: BackendSettings) -> AsyncIterator[TinkerEndpoint]:
    """An endpoint that answers and serves the model; the server's session ends with the block."""
    key = require_key(settings)
    url = address(settings)
    await check_alive(url, timeout_s=health_timeout_s(settings))
    with sdk_boundary(f"connecting to {url}"):
        service = tinker.ServiceClient(base_url=url, api_key=key)
    status: Literal["success", "errored", "interrupted"] = "interrupted"
    try:
        await check_model(settings, key=key)
        yield TinkerEndpoint(service, settings)
        status = "success"
    except Exception as error:
        status = "errored"
        await _blame_a_dead_server(settings, error)
        raise
    finally:
        # The SDK's own context manager would wait on a dead server for minutes, on the event loop.
        try:
            # In a thread: a session that is still being opened holds the lock that closing it takes.
            closing = in_thread(lambda: service.close(status).result())
            await asyncio.wait_for(closing, min(CLOSE_TIMEOUT_S, settings.heartbeat_timeout_s))
        except (TimeoutError, tinker.TinkerError) as error:
            logger.warning(
                "the session at %s did not close cleanly (%s); the server will drop it",
                url,
                type(error).__name__,
            )
