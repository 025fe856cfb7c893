"""The connection to the external sampler, a vLLM or SGLang server: identifies the external sampler, loads
adapters and requests samples."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import httpx

from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.errors import AdapterLostError, ConfigError, SamplerError
from skyrl_tx_server.external.wire import DIALECTS, Dialect, SampleReply, SamplingRequest, read_reply

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
# This client closes a connection that was idle for this time. The time is shorter than the keep-alive time of
# the external sampler, so no request uses a connection that the external sampler is closing.
KEEP_IDLE_S = 2.0


class ExternalServer:
    """An external sampler. `connect` creates it."""

    def __init__(self, client: _Client, dialect: Dialect, *, model: str, max_model_len: int | None) -> None:
        self.url = client.url
        self.dialect = dialect
        self.max_model_len = max_model_len  # None: unknown
        self._model = model  # name of the base model on the external sampler
        self._client = client

    async def sample(self, request: SamplingRequest, adapter: str | None) -> SampleReply:
        """Return samples. Raise AdapterLostError if `adapter` is not loaded, and SamplerError if the external
        sampler cannot be reached, refuses the request or sends an invalid reply."""
        path, body = self.dialect.request(request, adapter or self._model, adapter)
        response = await self._client.send("POST", path, body)
        if response.is_client_error and adapter is not None and adapter not in await self._client.served():
            raise AdapterLostError(f"the sampler at {self.url} has no adapter {adapter}")
        return await asyncio.to_thread(
            read_reply, self.dialect, self._client.checked(response).content, request
        )

    async def load(self, directory: Path) -> str:
        """Load an adapter in PEFT format from `directory` under a new name, and return this name. Raise
        SamplerError if the external sampler does not load the adapter."""
        name = f"skyrl-{uuid.uuid4().hex[:16]}"
        response = await self._client.send(
            "POST", self.dialect.load_path, {"lora_name": name, "lora_path": str(directory)}
        )
        if response.is_error:
            raise SamplerError(
                f"the sampler at {self.url} did not load the adapter in {directory} ({_message(response)}); "
                "it must be able to read the directory, its --max-lora-rank must be at least the adapter's "
                "rank, and it must support adapters of all trained modules"
            )
        return name

    async def unload(self, name: str) -> None:
        self._client.checked(await self._client.send("POST", self.dialect.unload_path, {"lora_name": name}))


class _Client:
    """Sends HTTP requests. `send` raises SamplerError if there is no reply, `checked` if the status is an
    error."""

    def __init__(self, http: httpx.AsyncClient, timeout_s: float) -> None:
        self.url = str(http.base_url).rstrip("/")
        self._http = http
        self._timeout_s = timeout_s

    async def served(self) -> dict[str, Mapping[str, object]]:
        """Return the entries of /v1/models (the base model and the loaded adapters) by name."""
        response = self.checked(await self.send("GET", "/v1/models"))
        try:
            return {str(card["id"]): card for card in response.json()["data"]}
        except (KeyError, TypeError, ValueError):
            raise SamplerError(f"{self.url}/v1/models is not a list of models") from None

    async def send(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._http.request(method, path, json=body)
        except TimeoutError:
            raise SamplerError(
                f"the sampler at {self.url} did not reply within sampler_timeout_s={self._timeout_s:g}; "
                "check the sampler, or start this server with a larger sampler_timeout_s"
            ) from None
        except httpx.HTTPError as error:
            raise SamplerError(
                f"the sampler at {self.url} cannot be reached ({str(error) or type(error).__name__}); try "
                f"again"
            ) from error

    def checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            raise SamplerError(
                f"the sampler at {self.url} refused {response.request.url.path}: {_message(response)}"
            )
        return response


@asynccontextmanager
async def connect(
    options: SamplerOptions, *, base_model: str, adapters: Path
) -> AsyncGenerator[ExternalServer]:
    """Connect to the external sampler. Raise ConfigError if it does not answer, is of an unknown kind, serves
    another model or cannot load adapters at run time.

    Unload the adapters whose files are in the directory `adapters`, because only an earlier process of
    skyrl_tx_server can have loaded them.
    """
    assert options.sampler_url is not None, "there is no external sampler to connect to"
    key = options.sampler_api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_IDLE_S)
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(
        base_url=options.sampler_url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as http:
        try:
            server = await _identify(_Client(http, options.sampler_timeout_s), base_model, adapters)
        except SamplerError as error:
            raise ConfigError(f"sampler_url={options.sampler_url}: {error}") from None
        yield server


async def _identify(client: _Client, base_model: str, adapters: Path) -> ExternalServer:
    served = await client.served()
    kind = str(next(iter(served.values()), {}).get("owned_by"))
    if kind not in DIALECTS:
        raise SamplerError(
            f"the kind of the sampler is unknown: the first entry of /v1/models has owned_by={kind}, which "
            f"must be {' or '.join(DIALECTS)}"
        )
    if base_model not in served or served[base_model].get("parent"):
        raise SamplerError(
            f"the external sampler serves {', '.join(served)}; start it with "
            f"--served-model-name {base_model} and with the same base weights as this server"
        )
    length = served[base_model].get("max_model_len")
    server = ExternalServer(
        client, DIALECTS[kind], model=base_model, max_model_len=length if isinstance(length, int) else None
    )
    response = await client.send("GET", server.dialect.load_path)
    if response.status_code == HTTPStatus.NOT_FOUND:  # an existing POST route replies 405
        raise SamplerError(
            f"the external sampler cannot load adapters at run time; start it with {server.dialect.needs}"
        )
    for name, card in served.items():
        if card.get("parent") and Path(str(card.get("root"))).is_relative_to(adapters):
            await server.unload(name)
    logger.info("%s at %s is the external sampler, max_model_len %s", kind, client.url, server.max_model_len)
    return server


def _message(response: httpx.Response) -> str:
    return f"{response.status_code} {' '.join(response.text.split())[:400]}"
