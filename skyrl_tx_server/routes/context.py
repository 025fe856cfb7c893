"""What every route may use: the engine, the books, the checkpoints, and the limits requests are checked against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_tx_server.engine import EngineSide
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.futures import FutureStore
from skyrl_tx_server.ledger import Ledger
from skyrl_tx_server.registry import Registry
from skyrl_tx_server.routes.access import AccessPolicy
from skyrl_tx_server.routes.bodies import BodyBudget
from skyrl_tx_server.wire.requests import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """The HTTP side's view of the server's options."""

    model_dir: Path | None  # offered as tokenizer to clients on this machine; None: they go by the model's name
    max_request_bytes: int = 64 << 20
    stalled_s: float = 120.0  # how long a body may pause before its client counts as gone
    sample_max_concurrent_requests: int = 256
    api_key: str | None = None  # None: whoever reaches the port may use it
    access: AccessPolicy = field(default_factory=AccessPolicy)  # which names and web pages may


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    engine: EngineSide
    registry: Registry
    futures: FutureStore
    checkpoints: CheckpointStore
    ledger: Ledger
    settings: HttpSettings
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # answered, by method, route and status
    bodies: BodyBudget = field(default_factory=BodyBudget)

    @property
    def base_model(self) -> str:
        return self.engine.info.base_model

    @property
    def limits(self) -> Limits:
        info = self.engine.info
        return Limits(vocab_size=info.vocab_size, max_context_length=info.max_context_length, max_lora_rank=info.max_lora_rank)

    def check_base_model(self, name: str) -> None:
        if name != self.base_model:
            raise UserError(f"this server runs {self.base_model}, not {name}; ask for base_model={self.base_model!r}")
