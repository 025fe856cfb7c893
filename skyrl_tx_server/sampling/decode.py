"""The decode pipeline, with at most one decode dispatch in flight.

A dispatch is one program call that samples the next tokens of all sequences in slots. It can start before
the host has processed the outputs of the previous dispatch. It does not need these outputs: the last tokens
are on the device (`Carry`), and the host knows the position of every sequence that has not ended. A sequence
that the device has ended is idle in the next dispatch. If the host ends a sequence at a stop string, the
tokens that the next dispatch samples for this sequence are discarded.

    device    | dispatch n           | dispatch n+1         | dispatch n+2
    host      | plan n+1       wait  | process n, plan n+2  | process n+1, ...
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_tx_server.engine.executor_protocol import FailedSequence, FinishedSequence
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.sampling.completion import CompletionChecker
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch
from skyrl_tx_server.sampling.decode_step import Carry, DecodeOutputs
from skyrl_tx_server.sampling.model_runner import ModelRunner
from skyrl_tx_server.sampling.preemption import SequencePool


@dataclass(kw_only=True, slots=True)
class InFlightBatch:
    """A dispatch that has started and that `poll` has not processed yet."""

    dispatch: DecodeDispatch
    outputs: DecodeOutputs
    next: DecodeDispatch | None = None  # the next dispatch; None: not planned, see `_plan_after`
    host_outputs: DecodeOutputs | None = None  # the outputs on the host; None: `decode` has not received them

    @property
    def ended(self) -> bool:
        """Whether the device has ended a sequence of this dispatch, in this dispatch or the previous one. The
        device does not check stop strings."""
        assert self.host_outputs is not None
        active = self.host_outputs.carry.active
        return not all(active[index] for index, _, _ in self.dispatch.sequences)


class DecodePipeline:
    def __init__(self, pool: SequencePool, runner: ModelRunner, completion: CompletionChecker) -> None:
        self._pool = pool
        self._runner = runner
        self._completion = completion
        self.in_flight: InFlightBatch | Exception | None = None  # Exception: the dispatch could not start
        self._num_ahead = 0  # number of dispatches that started before the previous outputs were processed

    def stats(self) -> dict[str, object]:
        return {"decode_dispatches_ahead": self._num_ahead}

    def decode(self) -> bool:
        """Start a dispatch if none is in flight, plan the next dispatch, and wait for the dispatch in flight.
        Return whether the device has ended a sequence. If `poll` could not start this dispatch, raise the
        error that `poll` caught."""
        if isinstance(self.in_flight, Exception):
            raise self.in_flight
        if self.in_flight is None:
            self._pool.preempt_and_allocate(self._runner.steps)
            self._pool.compact()
            if not (sequences := self._pool.decoding):
                return False
            dispatch = self._runner.first_dispatch(sequences)
            self.in_flight = self._start(dispatch, dispatch.batch.before)
            self._mark_pending(self.in_flight.dispatch)
        self.in_flight.next = self._plan_after(self.in_flight.dispatch)
        self.in_flight.host_outputs = to_host(self.in_flight.outputs)
        return self.in_flight.ended

    def poll(self, *, dispatch_next: bool) -> list[FinishedSequence | FailedSequence]:
        """Process the outputs of the dispatch for which `decode` waited, and return the results of the
        sequences that finished or failed. With `dispatch_next`, first start the dispatch that `decode`
        planned. It is not started if the device has ended all its sequences, or if preempted sequences may be
        restored with the pages of sequences that ended."""
        completed, self.in_flight = self.in_flight, None
        if not isinstance(completed, InFlightBatch):
            return []
        assert completed.host_outputs is not None, "poll was called before decode"
        outputs, following = completed.host_outputs, completed.next
        active = outputs.carry.active
        if completed.ended and self._pool.preempted:
            following = None  # preempted sequences may be restored with the pages of sequences that ended
        if (
            dispatch_next
            and following is not None
            and any(
                active[index] or not sequence.pending_tokens for index, _, sequence in following.sequences
            )
        ):
            try:
                self.in_flight = self._start(following, completed.outputs.carry)
                self._num_ahead += 1
            except Exception as error:  # the next `decode` raises it; the results of `completed` are valid
                self.in_flight = error
        results = []
        for index, slot, sequence in completed.dispatch.sequences:
            sequence.pending_tokens = 0
            if self._pool.slots[slot] is sequence:  # the sequence has not been released
                valid = outputs.tokens[index] >= 0
                tokens, logprobs = outputs.tokens[index][valid], outputs.logprobs[index][valid]
                results.append(self._completion.append(slot, tokens.tolist(), logprobs.tolist()))
        if isinstance(self.in_flight, InFlightBatch):
            self._mark_pending(self.in_flight.dispatch)
        return [result for result in results if result is not None]

    def _start(self, dispatch: DecodeDispatch, carry: Carry) -> InFlightBatch:
        return InFlightBatch(dispatch=dispatch, outputs=self._runner.decode(dispatch, carry))

    def _mark_pending(self, dispatch: DecodeDispatch) -> None:
        for _, _, sequence in dispatch.sequences:
            sequence.pending_tokens = self._runner.steps

    def _plan_after(self, dispatch: DecodeDispatch) -> DecodeDispatch | None:
        """Return the dispatch that can follow `dispatch` before its outputs are known, and allocate pages for
        it.

        The result is None in these cases:
        - No sequence can have tokens left to sample.
        - Too few pages are available.
        - `dispatch` uses a rolled program, or the next dispatch needs another program than `dispatch`.
        - The next dispatch can use a narrower program after `SequencePool.compact`.
        """
        sequences = [(slot, sequence) for slot, sequence in self._pool.decoding if sequence.remaining > 0]
        if not sequences or not self._pool.allocate_next(sequences, self._runner.steps):
            return None
        layout, width = self._runner.decode_layout, dispatch.program.width
        if layout.width_of([slot for slot, _ in sequences]) > width:
            return None
        following = layout.dispatch(sequences, width=width)
        if following.program != dispatch.program or self._runner.can_narrow(following):
            return None
        return self._runner.transfer(following)
