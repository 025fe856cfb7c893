"""The kinds of work that the scheduler gives to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_tx_server.engine.operations import DEFAULT_TENANT, Op, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationStep:
    """Run the operation `request_id` until its generator (`executor_protocol.Job`) yields or ends. An
    operation step of training computes one micro-batch."""

    request_id: int
    op: Op


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRequest:
    """Compute the prompt of `op` and assign slots to its sequences `first .. first + count - 1`.

    A request for a paused sequence contains only this sequence. If the sequence still has its KV pages and
    its data-parallel rank has a free slot, nothing is computed. Otherwise its prefix is computed again.
    """

    request_id: int
    op: Sample
    first: int
    count: int
    tenant: str = DEFAULT_TENANT
    paused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Compute one prefill batch: the first of these requests, and as many of the next requests as fit.
    Requeue the requests that do not fit."""

    requests: tuple[PrefillRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Complete one decode dispatch: several decode steps in one program call. The engine may have started the
    dispatch during the previous `Decode`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Free the slots of these sequences, each given as (request_id, index of the sequence). The scheduler
    schedules this work only while no decode steps are in flight.

    The scheduler later schedules a `PrefillRequest` for each of these sequences, which unpauses it.
    """

    sequences: tuple[tuple[int, int], ...]


ScheduledWork = OperationStep | Prefill | Decode | Pause
