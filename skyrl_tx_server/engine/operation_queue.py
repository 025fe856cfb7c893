"""The queues of all operations except `Sample`.

Each model has a queue. Each snapshot of sampler weights that a `DropSnapshot` frees also has one. The tenants
take turns: an operation step of one tenant is followed by an operation step of the next tenant that has any.
An operation step is a part of an operation that the engine runs without interruption.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from skyrl_tx_server.engine.operations import DropSnapshot, Op, Sample, SaveSampler
from skyrl_tx_server.engine.scheduled_work import OperationStep


@dataclass(kw_only=True, slots=True)
class _ModelQueue:
    """The operations of one model, or the `DropSnapshot` operations of one snapshot. They run one after the
    other."""

    tenant: str
    steps: deque[OperationStep] = field(default_factory=deque)


class OperationQueue:
    """Chooses the next operation. The operations of a queue run in submission order. The tenants take turns,
    and so do the queues of a tenant (round robin). A queue holds one `OperationStep` for each operation.
    `next` may return it several times, until `finish` removes it."""

    def __init__(self) -> None:
        self._queues: dict[str, _ModelQueue] = {}
        self._steps: dict[int, OperationStep] = {}  # operations that have not ended, by request_id
        # Tenant -> names of its queues. The round-robin order is the order of the tenants and of the names.
        self._order: dict[str, dict[str, None]] = {}
        # Maps a snapshot to the request_ids of the operations that save it.
        self._saves: defaultdict[str, dict[int, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, request_id: int, op: Op, *, tenant: str) -> None:
        name = _queue_name(op)
        if name not in self._queues:
            self._queues[name] = _ModelQueue(tenant=tenant)
            self._order.setdefault(tenant, {})[name] = None
        step = self._steps[request_id] = OperationStep(request_id=request_id, op=op)
        self._queues[name].steps.append(step)
        if isinstance(op, SaveSampler):
            self._saves[op.weights][request_id] = None

    def next(self, may_run: Callable[[OperationStep], bool]) -> OperationStep | None:
        """Return the step that may run and is first in round-robin order, or None if no step may run."""
        steps = (self._queues[name].steps[0] for names in self._order.values() for name in names)
        return next((step for step in steps if may_run(step)), None)

    def rotate(self, op: Op) -> None:
        """Move the tenant of `op` to the end of the tenants, and the queue of `op` to the end of the tenant's
        queues."""
        name = _queue_name(op)
        tenant = self._queues[name].tenant
        names = self._order.pop(tenant)
        del names[name]
        names[name] = None
        self._order[tenant] = names

    def waiting(self, request_id: int) -> OperationStep | None:
        """Return the step of an operation that has not ended. None: the operation has ended, or it is a
        `Sample`."""
        return self._steps.get(request_id)

    def finish(self, step: OperationStep) -> None:
        """Remove the operation of `step`, which has ended or was cancelled. Ignore an operation that was
        removed already. The next operation of its model can then run."""
        if self._steps.pop(step.request_id, None) is None:
            return
        name = _queue_name(step.op)
        queue = self._queues[name]
        queue.steps.remove(step)
        if not queue.steps:
            del self._queues[name], self._order[queue.tenant][name]
            if not self._order[queue.tenant]:
                del self._order[queue.tenant]
        if isinstance(step.op, SaveSampler):
            saves = self._saves[step.op.weights]
            del saves[step.request_id]
            if not saves:
                del self._saves[step.op.weights]

    def is_being_saved(self, weights: str, before: int) -> bool:
        """Whether an unfinished operation saves the snapshot `weights` and was submitted before request
        `before`."""
        return any(request_id < before for request_id in self._saves.get(weights, ()))

    def is_being_dropped(self, weights: str, before: int) -> bool:
        """Whether an unfinished operation that was submitted before request `before` drops the snapshot."""
        drops = self._queues.get(_snapshot_queue(weights))
        return drops is not None and drops.steps[0].request_id < before


def _queue_name(op: Op) -> str:
    """Return the queue name of `op`. A DropSnapshot has no model, so it waits in a queue of its snapshot."""
    assert not isinstance(op, Sample)
    return _snapshot_queue(op.weights) if isinstance(op, DropSnapshot) else f"model {op.model_id}"


def _snapshot_queue(weights: str) -> str:
    return f"snapshot {weights}"
