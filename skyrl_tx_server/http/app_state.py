"""The application state that all handlers use, for the operator and for each tenant."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.engine import EngineClient
from skyrl_tx_server.engine.futures import FutureStore
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.operations import DEFAULT_TENANT
from skyrl_tx_server.engine.tenants import TenantKeys
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.access import AccessPolicy
from skyrl_tx_server.http.bodies import BodyReader
from skyrl_tx_server.http.shares import EngineShare
from skyrl_tx_server.http.wire.limits import Limits

type RequestCounts = Counter[tuple[str, str, int]]
"""Number of replies by method, route and status."""

MAX_THREADS = 2
"""The number of long texts and large results that are converted for one tenant at the same time. The requests
of other tenants use the remaining threads of the pool."""
MAX_LARGE_REPLIES = 8  # the number of large results of one tenant that are in memory in encoded form
UNLIMITED = sys.maxsize


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """The options of the HTTP side, with the values that are derived from them."""

    model_dir: Path | None
    """The directory of the tokenizer, for OpenAI's routes and for clients on this machine. None: OpenAI's
    routes for completions refuse every request, and clients find the tokenizer by the name of the model."""
    sample_max_concurrent_requests: int = 256
    api_key: str | None = None  # the key of the operator; see `_check_key` in `http_handler`
    access: AccessPolicy = field(default_factory=AccessPolicy)  # the accepted `Host` and `Origin` headers
    tenant_keys: TenantKeys | None = None
    tenant_quota: TenantOptions = field(default_factory=TenantOptions)
    max_connections: int = 4096

    @property
    def num_tenants(self) -> int:
        """The number of tenants, and 1 for a server without tenants."""
        return max(1, 0 if self.tenant_keys is None else len(self.tenant_keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class AppState:
    """The state of the operator, who can access everything, or of a tenant.

    The state of a tenant contains the tenant's futures, an engine that limits the tenant's tokens in flight,
    the tenant's limits on request bodies and threads, and views of the registry, the checkpoints and the run
    index. In these views, a lookup finds no objects of other tenants, except public checkpoints. A handler
    receives the state of the tenant that sent the request, so handlers do not check who owns an object. There
    is one exception: a handler that sets the expiry or the public flag of a checkpoint calls
    `CheckpointStore.owned_info` first, because the run index does not check the owner. The handler of a route
    that needs no key receives the operator's state.
    """

    engine: EngineClient
    registry: Registry
    futures: FutureStore
    checkpoints: CheckpointStore
    run_index: RunIndex
    settings: HttpSettings
    requests: RequestCounts = field(default_factory=Counter)
    in_progress: Counter[str] = field(default_factory=Counter)
    """Number of requests in progress by tenant. A request is in progress until its reply is sent."""
    bodies: BodyReader = field(default_factory=BodyReader)
    threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNLIMITED))
    """Held while a thread converts a long text of this tenant to tokens, or encodes a large result."""
    large_replies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNLIMITED))
    """Held while a large result of this tenant is encoded and sent."""
    tenant: str = DEFAULT_TENANT
    # tenant -> state of the tenant; a tenant has no state before its first request
    tenants: dict[str, AppState] = field(default_factory=dict)

    def for_tenant(self, tenant: str) -> AppState:
        """Return the state of a tenant. Create the state if it does not exist. Only the operator's state can
        return the state of another tenant."""
        if tenant == self.tenant:
            return self
        assert self.is_operator, f"{self.tenant} requested the state of {tenant}"
        if tenant not in self.tenants:
            num_tenants, quota = self.settings.num_tenants, self.settings.tenant_quota
            self.tenants[tenant] = replace(
                self,
                engine=EngineShare(self.engine, tenant, quota.tenant_max_tokens),
                registry=self.registry.for_tenant(tenant, quota),
                futures=self.futures.share(num_tenants),
                bodies=self.bodies.share(num_tenants),
                threads=asyncio.Semaphore(MAX_THREADS),
                large_replies=asyncio.Semaphore(MAX_LARGE_REPLIES),
                checkpoints=self.checkpoints.for_tenant(tenant, self.run_index.public.__contains__),
                run_index=self.run_index.for_tenant(tenant),
                tenant=tenant,
            )
        return self.tenants[tenant]

    @property
    def is_operator(self) -> bool:
        return self.tenant == DEFAULT_TENANT

    def close(self) -> None:
        """End all polls that wait for a future. The server calls this method when it stops."""
        for state in (self, *self.tenants.values()):
            state.futures.close()

    @property
    def base_model(self) -> str:
        return self.engine.info.base_model

    @property
    def limits(self) -> Limits:
        info = self.engine.info
        return Limits(
            vocab_size=info.vocab_size,
            max_context_length=info.max_context_length,
            max_lora_rank=info.max_lora_rank,
        )

    def check_base_model(self, name: str) -> None:
        if name != self.base_model:
            raise UserError(
                f"this server runs {self.base_model}, not {name}; use base_model={self.base_model!r} and its "
                f"checkpoints, or a server of {name}"
            )
