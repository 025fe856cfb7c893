"""What every route may use: the engine, the books, the checkpoints, and the limits requests are checked against, for each tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.engine import EngineSide
from skyrl_tx_server.engine.futures import FutureStore
from skyrl_tx_server.engine.model_registry import Registry
from skyrl_tx_server.engine.operations import DEFAULT_TENANT
from skyrl_tx_server.engine.tenants import TenantKeys
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.run_index import RunIndex
from skyrl_tx_server.http.access import AccessPolicy
from skyrl_tx_server.http.bodies import BodyBudget
from skyrl_tx_server.http.shares import EngineShare
from skyrl_tx_server.http.wire.requests import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """The HTTP side's view of the server's options."""

    model_dir: (
        Path | None
    )  # offered as tokenizer to clients on this machine; None: they go by the model's name
    max_request_bytes: int = 64 << 20
    stalled_s: float = 120.0  # how long a body may pause before its client counts as gone
    sample_max_concurrent_requests: int = 256
    api_key: str | None = (
        None  # the operator's; None, and no tenant_keys: whoever reaches the port is the operator
    )
    access: AccessPolicy = field(default_factory=AccessPolicy)  # which names and web pages may
    tenant_keys: TenantKeys | None = None
    tenant_quota: TenantOptions = field(default_factory=TenantOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class AppState:
    """The operator's context, which reaches everything, or, made by `of`, a tenant's.

    A tenant's context holds views of the registry, the checkpoints and the ledger in which nothing of another tenant exists, futures of
    its own, and an engine that counts what it has under way. A handler gets the context of whoever sent the request, so it needs no check
    of its own.
    """

    engine: EngineSide
    registry: Registry
    futures: FutureStore
    checkpoints: CheckpointStore
    ledger: RunIndex
    settings: HttpSettings
    requests: Counter[tuple[str, str, int]] = field(
        default_factory=Counter
    )  # answered, by method, route and status
    bodies: BodyBudget = field(default_factory=BodyBudget)
    tenant: str = DEFAULT_TENANT
    tenants: dict[str, AppState] = field(default_factory=dict)  # the contexts made so far, by tenant

    def of(self, tenant: str) -> AppState:
        """The context of a tenant; only the operator's makes those of others."""
        if tenant == self.tenant:
            return self
        assert self.is_operator, f"{self.tenant} asked for the context of {tenant}"
        if tenant not in self.tenants:
            keys, quota = self.settings.tenant_keys, self.settings.tenant_quota
            self.tenants[tenant] = replace(
                self,
                engine=EngineShare(self.engine, tenant, quota.tenant_max_tokens),
                registry=self.registry.of(tenant, quota),
                futures=self.futures.share(max(1, 1 if keys is None else len(keys))),
                checkpoints=self.checkpoints.of(tenant, self.ledger.public.__contains__),
                ledger=self.ledger.of(tenant),
                tenant=tenant,
            )
        return self.tenants[tenant]

    @property
    def is_operator(self) -> bool:
        return self.tenant == DEFAULT_TENANT

    def close(self) -> None:
        """Let go of every waiting poll: the server is stopping."""
        for context in (self, *self.tenants.values()):
            context.futures.close()

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
                f"this server runs {self.base_model}, not {name}; ask for base_model={self.base_model!r}"
            )
