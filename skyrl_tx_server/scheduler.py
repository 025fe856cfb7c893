"""Which work comes next: pure bookkeeping, no threads and no devices.

Rules, each with its test:
- Operations of one model run in submission order, one at a time; models take turns, one step (one micro-batch) each.
- When training and sampling both have work they alternate: a decode block between two training steps, a training step between two decode
  blocks. A forward pass beside a long generation therefore waits for one block (and at most PREFILLS_PER_TURN prefills).
- Prefills after which no more rows decode than before (all of them were over with their first token) let running samples have a decode
  block as often as training does.
- A long prompt is prefilled in pieces, and running samples get a decode block between two of them.
- A decode block follows the one before it at once, while the host looks at what that one brought, unless somebody else's turn is next.
- Waiting samples get free slots in the order they came; a request for several samples may enter in parts.
- A sample waits for a snapshot that is still being saved, and dropping a snapshot waits for the samples that were asked for before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_tx_server.ops import DEFAULT_TENANT, DropSnapshot, Op, Sample, SaveSampler

PREFILLS_PER_TURN = 4
"""Prefills before a decode block while training waits, or in a row that fill no slot; otherwise every free slot is filled first."""
PROMPTS_PER_PREFILL = 16
"""Are offered to be computed together: as many as the largest pass has blocks (see `batching`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Run one step of the operation `ticket`: one micro-batch of training, or a whole small operation."""

    ticket: int
    op: Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Prefill the prompt of `op` and give samples `first .. first + count - 1` of it a slot each."""

    ticket: int
    op: Sample
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Admit as many of these, in their order, as are computed together. The others go back by `put_back`."""

    admits: tuple[Admit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Run one decode block over all occupied slots."""


Turn = Step | Prefill | Decode


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    ticket: int
    op: Sample
    first: int  # samples below this index have their slots already


class Scheduler:
    """The queues and whose turn it is. The caller owns the lock."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Step]] = {}  # by model; the dict's order is the round-robin order
        self._samples: deque[_Waiting] = deque()
        self._training_next = True
        self._prefills = 0  # since the last decode block
        self._in_vain = 0  # of them, since the last that left more rows decoding
        self._rows_decoding = 0  # before this turn
        self._samples_held = False
        self._decode_next = False  # a piece of a prompt was the last turn

    def add(self, ticket: int, op: Op, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queue `op`; tickets grow with every submission."""
        if isinstance(op, Sample):
            self._samples.append(_Waiting(ticket=ticket, op=op, first=0))
        else:
            self._lines.setdefault(_line_of(op), deque()).append(Step(ticket=ticket, op=op))

    def next(self, *, free_slots: int, rows_decoding: int) -> Turn | None:
        """The next turn; None when there is nothing to do until something is added or a row finishes."""
        step = self._runnable_step()
        if rows_decoding > self._rows_decoding:
            self._in_vain = 0
        self._rows_decoding = rows_decoding
        decode_next = self._decode_next or self._in_vain >= PREFILLS_PER_TURN
        admits = () if decode_next and rows_decoding else self._admissions(free_slots)
        if step is not None and self._prefills >= PREFILLS_PER_TURN:
            admits = ()
        if step is not None and (self._training_next or not (admits or rows_decoding)):
            self._training_next = False
            self._prefills = 0
            line = _line_of(step.op)
            self._lines[line] = self._lines.pop(line)
            return step
        if admits:
            self._prefills += 1
            self._in_vain += 1
            for admit in admits:
                self._take(admit)
            return Prefill(admits=admits)
        if rows_decoding:
            self._training_next = True
            self._decode_next = False
            self._prefills = self._in_vain = 0
            return Decode()
        return None

    def interrupts(self, *, free_slots: int) -> bool:
        """Whether the turn after a decode block is somebody else's."""
        return self._runnable_step() is not None or bool(self._admissions(free_slots))

    def finish(self, step: Step) -> None:
        """The operation of `step` is over, well or badly; its model's next one may run."""
        line = self._lines[_line_of(step.op)]
        assert line[0].ticket == step.ticket
        line.popleft()
        if not line:
            del self._lines[_line_of(step.op)]

    def put_back(self, admits: Sequence[Admit]) -> None:
        """These keep their places at the head of the queue."""
        for admit in reversed(admits):
            if admit.first + admit.count < admit.op.num_samples:  # the rest of it still waits
                del self._samples[self._place_of(admit.ticket)]
            self._samples.appendleft(_Waiting(ticket=admit.ticket, op=admit.op, first=admit.first))

    def hold(self, admits: Sequence[Admit]) -> None:
        """The executor has no room for the first of these now: they keep their places until a row finishes."""
        self.put_back(admits)
        self._samples_held = True

    def resume(self, admit: Admit) -> None:
        """A piece of the prompt of `admit` is done: it stays at the head of the queue, but running samples come first."""
        self.put_back([admit])
        self._decode_next = True

    def row_finished(self) -> None:
        self._samples_held = False

    def drop_sample(self, ticket: int) -> None:
        """Forget what still waits of a failed request."""
        self._samples = deque(waiting for waiting in self._samples if waiting.ticket != ticket)

    @property
    def num_waiting_samples(self) -> int:
        return len(self._samples)

    @property
    def num_waiting_steps(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def _runnable_step(self) -> Step | None:
        return next((line[0] for line in self._lines.values() if self._may_run(line[0])), None)

    def _may_run(self, step: Step) -> bool:
        match step.op:
            case DropSnapshot(weights=weights):
                return not any(w.op.weights == weights and w.ticket < step.ticket for w in self._samples) and not self._being_saved(
                    weights, step.ticket
                )
            case _:
                return True

    def _admissions(self, free_slots: int) -> tuple[Admit, ...]:
        admits: list[Admit] = []
        if self._samples_held:
            return ()
        for waiting in self._samples:
            if not free_slots or len(admits) == PROMPTS_PER_PREFILL:
                break
            if waiting.op.weights is None or not self._being_saved(waiting.op.weights, waiting.ticket):
                count = min(free_slots, waiting.op.num_samples - waiting.first)
                admits.append(Admit(ticket=waiting.ticket, op=waiting.op, first=waiting.first, count=count))
                free_slots -= count
        return tuple(admits)

    def _being_saved(self, weights: str, ticket: int) -> bool:
        return any(
            isinstance(step.op, SaveSampler) and step.op.weights == weights and step.ticket < ticket
            for line in self._lines.values()
            for step in line
        )

    def _take(self, admit: Admit) -> None:
        at = self._place_of(admit.ticket)
        if admit.first + admit.count == admit.op.num_samples:
            del self._samples[at]
        else:
            self._samples[at] = replace(self._samples[at], first=admit.first + admit.count)

    def _place_of(self, ticket: int) -> int:
        return next(at for at, waiting in enumerate(self._samples) if waiting.ticket == ticket)


def _line_of(op: Op) -> str:
    """Operations in one line run in order: those of one model, and those on one snapshot that no model owns."""
    assert not isinstance(op, Sample)
    return f"snapshot {op.weights}" if isinstance(op, DropSnapshot) else f"model {op.model_id}"
