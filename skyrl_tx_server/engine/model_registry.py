"""Sessions with their models and samplers.

The SDK derives the ids `<session>:train:<n>` of models and `<session>:sample:<n>` of samplers itself, so the
registry must use the same ids. All methods run on the event loop. `end_session` returns the operations that
free the memory of the session; the caller submits them. The view of one tenant (`Registry.for_tenant`)
reports the objects of other tenants as absent.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from skyrl_tx_server.config.tenant_options import TenantOptions
from skyrl_tx_server.engine.operations import DEFAULT_TENANT, DropSnapshot, LoraSpec, UnloadModel
from skyrl_tx_server.engine.tenants import id_prefix, owner_of
from skyrl_tx_server.errors import FutureLostError, NotFoundError, UserError

MAX_ENDED_SESSIONS = 10_000
"""The maximum number of ended sessions whose reason for ending is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A training model of a session."""

    model_id: str
    session_id: str
    lora: LoraSpec
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """The weights that a sampling client samples from: the base model, a sampler checkpoint, or a snapshot in
    memory.
    """

    sampler_id: str
    session_id: str
    model_path: str | None  # tinker:// path; None for the base model and for a snapshot in memory
    # As in `operations.Sample`: the sampler's own id for a snapshot in memory, the tinker:// path of a
    # sampler checkpoint, or None for the base model.
    weights: str | None

    @property
    def is_snapshot(self) -> bool:
        return self.weights == self.sampler_id


@dataclass(kw_only=True, slots=True)
class Session:
    session_id: str
    created_at: datetime
    last_seen: float  # time of the registry's clock
    tags: list[str]
    user_metadata: dict[str, str]
    display_name: str | None
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Registry:
    """All sessions, or the sessions of one tenant in a view created by `for_tenant`."""

    def __init__(self, *, session_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = session_timeout_s
        self.clock = clock
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # session id -> why it ended
        self.last_request_at: dict[str, datetime] = {}  # by model id
        self._snapshots: OrderedDict[str, None] = OrderedDict()  # sampler ids, least recently used first
        self._tenant: str | None = None  # None: the sessions of all tenants
        self._quota: TenantOptions | None = None

    def for_tenant(self, tenant: str, quota: TenantOptions) -> Registry:
        """Return a view of the sessions of `tenant`, limited by `quota`."""
        view = copy.copy(self)
        view._tenant, view._quota = tenant, quota
        return view

    def _owns(self, identifier: str) -> bool:
        return self._tenant is None or owner_of(identifier) == self._tenant

    def _find(self, session_id: str) -> Session | None:
        """Return a session by its id. Every lookup by id uses this method, so that a view contains only the
        sessions of its tenant."""
        return self._sessions.get(session_id) if self._owns(session_id) else None

    # --- sessions

    def open_session(
        self, *, tags: list[str], user_metadata: dict[str, str], display_name: str | None
    ) -> Session:
        if self._quota is not None and len(self.sessions()) >= self._quota.tenant_max_sessions:
            raise UserError(
                f"you have {self._quota.tenant_max_sessions} open sessions, which is the limit "
                f"(tenant_max_sessions); close some, or wait until they expire"
            )
        session = Session(
            session_id=f"{id_prefix(self._tenant or DEFAULT_TENANT)}session-{uuid.uuid4().hex[:16]}",
            created_at=datetime.now(UTC),
            last_seen=self.clock(),
            tags=tags,
            user_metadata=user_metadata,
            display_name=display_name,
        )
        self._sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Return a session, and record that its client is alive. Raise NotFoundError if it does not exist."""
        session = self.look_up(session_id)
        session.last_seen = self.clock()
        return session

    def look_up(self, session_id: str) -> Session:
        """Return a session, without recording that its client is alive. Raise NotFoundError if it does not
        exist."""
        session = self._find(session_id)
        if session is None:
            raise NotFoundError(
                f"no session {session_id}: {self._why_gone(session_id)}. Create a new ServiceClient"
            )
        return session

    def sessions(self) -> list[Session]:
        """Return the sessions, the newest first."""
        owned = (session for session in self._sessions.values() if self._owns(session.session_id))
        return sorted(owned, key=lambda session: session.created_at, reverse=True)

    def has_session(self, session_id: str) -> bool:
        return self._find(session_id) is not None

    def heartbeat(self, session_id: str) -> None:
        """Record that the client is alive. Raise FutureLostError if the session has ended or was never
        created. The SDK stops its heartbeats when it gets the status 410 of this error.
        """
        try:
            self.session(session_id)
        except NotFoundError as error:
            raise FutureLostError(str(error)) from None

    def touch(self, session_id: str | None) -> None:
        """Record that the client is alive, because it polls a future. Ignore an unknown session."""
        session = None if session_id is None else self._find(session_id)
        if session is not None:
            session.last_seen = self.clock()

    def expired(self) -> list[str]:
        """Return the ids of all sessions that have timed out, whichever tenant owns them."""
        deadline = self.clock() - self._timeout_s
        return [session.session_id for session in self._sessions.values() if session.last_seen < deadline]

    def end_session(self, session_id: str, why: str) -> list[UnloadModel | DropSnapshot]:
        """Remove the session and return the operations that free its models and snapshots. Ignore an unknown
        session."""
        session = self._find(session_id)
        if session is None:
            return []
        del self._sessions[session_id]
        self._ended[session_id] = why
        if len(self._ended) > MAX_ENDED_SESSIONS:
            self._ended.popitem(last=False)
        for model_id in session.models:
            self.last_request_at.pop(model_id, None)
        snapshots = [sampler.sampler_id for sampler in session.samplers.values() if sampler.is_snapshot]
        for sampler_id in snapshots:
            self._snapshots.pop(sampler_id, None)
        return [UnloadModel(model_id=model_id) for model_id in session.models] + [
            DropSnapshot(weights=weights) for weights in snapshots
        ]

    def _why_gone(self, session_id: str) -> str:
        unknown = "it never existed, or the server was restarted"
        return self._ended.get(session_id, unknown) if self._owns(session_id) else unknown

    # --- models

    def model_id(self, session_id: str, model_seq_id: int) -> str:
        return f"{self.session(session_id).session_id}:train:{model_seq_id}"

    def add_model(self, session_id: str, model_id: str, lora: LoraSpec) -> Model:
        session = self.session(session_id)
        if model_id in session.models:
            raise UserError(
                f"model {model_id} exists already; give each model of a session its own model_seq_id"
            )
        if self._quota is not None and self.stats()["models"] >= self._quota.tenant_max_models:
            raise UserError(
                f"you have {self._quota.tenant_max_models} models, which is the limit (tenant_max_models); "
                f"unload one, or close its session"
            )
        model = Model(model_id=model_id, session_id=session_id, lora=lora, created_at=datetime.now(UTC))
        session.models[model_id] = model
        self.last_request_at[model_id] = model.created_at
        return model

    def model(self, model_id: str) -> Model:
        """Return a model, and record that its client is alive. Raise NotFoundError if it does not exist."""
        session_id = model_id.split(":")[0]
        if self._find(session_id) is None:
            raise NotFoundError(
                f"no model {model_id}: {self._why_gone(session_id)}. "
                "Restore it from its last checkpoint with create_training_client_from_state_with_optimizer"
            )
        model = self.session(session_id).models.get(model_id)
        if model is None:
            raise NotFoundError(f"no model {model_id}: it was unloaded, or its creation failed")
        self.last_request_at[model_id] = datetime.now(UTC)
        return model

    def forget_model(self, model_id: str) -> None:
        session = self._find(model_id.split(":")[0])
        if session is not None:
            session.models.pop(model_id, None)
        self.last_request_at.pop(model_id, None)

    # --- samplers

    def sampler_id(self, session_id: str, seq_id: int) -> str:
        return f"{self.session(session_id).session_id}:sample:{seq_id}"

    def add_sampler(
        self, session_id: str, sampler_id: str, *, model_path: str | None, weights: str | None
    ) -> Sampler:
        """Add a sampler. Adding the same sampler again changes nothing, because a client repeats a request
        whose reply was lost. Raise UserError if the id exists with other weights or the tenant's limit is
        reached."""
        session = self.session(session_id)
        if (
            self._quota is not None
            and sampler_id not in session.samplers
            and self.stats()["samplers"] >= self._quota.tenant_max_samplers
        ):
            raise UserError(
                f"you have {self._quota.tenant_max_samplers} samplers, which is the limit "
                f"(tenant_max_samplers); close a session"
            )
        sampler = Sampler(
            sampler_id=sampler_id, session_id=session_id, model_path=model_path, weights=weights
        )
        existing = session.samplers.setdefault(sampler_id, sampler)
        if existing != sampler:
            raise UserError(
                f"sampler {sampler_id} exists already with other weights; give each sampler of a session its "
                f"own sampling_session_seq_id"
            )
        if sampler.is_snapshot:
            self._snapshots[sampler_id] = None
        return sampler

    def sampler(self, sampler_id: str) -> Sampler:
        session_id = sampler_id.split(":")[0]
        if self._find(session_id) is None:
            raise NotFoundError(
                f"no sampler {sampler_id}: {self._why_gone(session_id)}. Create a new sampling client"
            )
        sampler = self.session(session_id).samplers.get(sampler_id)
        if sampler is None:
            raise NotFoundError(
                f"no sampler {sampler_id}: it was never created, saving its weights failed, or the limit "
                "tenant_max_snapshots removed it. Create a new sampling client"
            )
        self._use(sampler_id)
        return sampler

    def find_sampler(self, sampler_id: str) -> Sampler | None:
        """Return a sampler, or None. Do not record that the client of its session is alive."""
        session = self._find(sampler_id.split(":")[0])
        self._use(sampler_id)
        return None if session is None else session.samplers.get(sampler_id)

    def _use(self, sampler_id: str) -> None:
        if sampler_id in self._snapshots and self._owns(sampler_id):
            self._snapshots.move_to_end(sampler_id)

    def forget_sampler(self, sampler_id: str) -> None:
        session = self._find(sampler_id.split(":")[0])
        if session is not None:
            session.samplers.pop(sampler_id, None)
            self._snapshots.pop(sampler_id, None)

    def free_surplus_snapshots(self) -> list[DropSnapshot]:
        """Remove the tenant's least recently used snapshots above its quota. Return the operations that free
        them."""
        if self._quota is None:
            return []
        snapshots = [sampler_id for sampler_id in self._snapshots if self._owns(sampler_id)]
        surplus = snapshots[: max(0, len(snapshots) - self._quota.tenant_max_snapshots)]
        for sampler_id in surplus:
            self.forget_sampler(sampler_id)
        return [DropSnapshot(weights=sampler_id) for sampler_id in surplus]

    def stats(self) -> dict[str, int]:
        sessions = self.sessions()
        return {
            "sessions": len(sessions),
            "models": sum(len(session.models) for session in sessions),
            "samplers": sum(len(session.samplers) for session in sessions),
            "snapshots": sum(
                sampler.is_snapshot for session in sessions for sampler in session.samplers.values()
            ),
        }
