"""The protocol of the executor, which owns the devices, and the records that it exchanges with the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from skyrl_tx_server.engine.operations import CsrMatrix, Op, OpResult, SampledSequence, TopkLogprobs
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import ServerError

type Job[Result] = Generator[Future[Any] | None, None, Result]
"""The execution of an operation. If the generator yields a future, the engine continues the generator when
the future is done. If it yields None, the engine continues it when the scheduler chooses the operation
again."""

ON_ALL_RANKS: set[str] = set()
"""Names of the sampler's methods that every rank (process of the server) must call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The properties of the model and its devices that clients can query."""

    base_model: str
    max_context_length: int  # tokens of prompt and completion together
    max_lora_rank: int
    vocab_size: int
    model_type: str = "qwen3"  # as in config.json
    eos_token_ids: tuple[int, ...] = ()
    devices: str = ""  # number and kind, as in "8 NVIDIA H100"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSequence:
    """A complete sequence. `index` is its index in its request."""

    request_id: int
    index: int
    sequence: SampledSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSequence:
    """A sequence that has failed. Its whole request fails; other requests are not affected."""

    request_id: int
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningSequence:
    """The tokens of sequence `index` of a request so far. The lists grow, so a caller that keeps them must
    copy them."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The result of a `PrefillRequest` whose prompt is completely computed. The sequences of the
    `PrefillRequest` have slots, except the sequences in `finished`."""

    prompt_logprobs: np.ndarray | None  # [prompt tokens] float32; None: not requested or in an earlier result
    prompt_cache_hit_tokens: int  # for a paused sequence: all prompt tokens
    finished: Sequence[FinishedSequence | FailedSequence]  # sequences that ended with their first token
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: CsrMatrix | None = None


class SequencesLostError(ServerError):
    """The KV cache with the state of all sequences was lost. The executor continues with an empty cache. With
    several ranks, the server stops."""

    num_requests: int = 1  # number of requests in the failed prefill batch; 0: a decode dispatch failed


def on_all_ranks[**Inputs, Output](method: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """Mark a method that changes the state of the sampler. In a server with several ranks every rank calls
    the method, in the same order."""
    ON_ALL_RANKS.add(method.__name__)
    return method


class Sampler(Protocol):
    """The part of an executor that samples."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_running(self) -> int:
        """The number of sequences that have a slot. A preempted sequence counts, because its slot stays
        reserved."""
        ...

    @property
    def num_preempted(self) -> int:
        """The number of preempted sequences, which have lost their KV pages because too few were free."""
        ...

    @property
    def max_partial_prefill_tokens(self) -> int:
        """The maximum total length, in tokens, of all partly computed prompts. One prompt alone may be
        longer."""
        ...

    @property
    def prefills_per_dispatch(self) -> float:
        """The estimated duration of a decode dispatch for all slots, divided by the estimated duration of a
        full prefill batch."""
        ...

    @on_all_ranks
    def prefill(self, requests: Sequence[PrefillRequest]) -> Sequence[PrefillResult | None]:
        """Compute one prefill batch. It contains the prompts, or the next prefill chunks, of as many of the
        first requests as fit. Assign slots to the sequences of each request whose prompt is complete.

        Returns one entry for each request of the batch. None means that the prompt needs further prefill
        chunks, so the request must be submitted again. Raises CapacityError if the first request must wait
        for KV pages, a LoRA slot or preempted sequences, and SequencesLostError if the KV cache was lost.
        After any error except SequencesLostError the state of all sequences is unchanged, except that paused
        sequences may have lost their KV pages.
        """
        ...

    @on_all_ranks
    def decode(self) -> bool:
        """Wait for the decode dispatch that is in flight. If none is in flight, start one first.
        Return whether the device has ended a sequence. The device does not check stop strings; `poll`
        checks them.

        The next call must be `poll`, which returns the ended sequences. After any error all sequences are
        lost.
        """
        ...

    @on_all_ranks
    def poll(self, *, dispatch_next: bool) -> Sequence[FinishedSequence | FailedSequence]:
        """Return the sequences that have ended since the previous `poll`. With `dispatch_next`, first start
        the next decode dispatch, if possible. The next call of `decode` waits for this dispatch."""
        ...

    @on_all_ranks
    def pause(self, sequences: Collection[tuple[int, int]]) -> None:
        """Remove these sequences, each given as (request_id, index), from their slots until `prefill`
        unpauses them. No decode dispatch may be in flight."""
        ...

    @on_all_ranks
    def release(self, request_id: int) -> None:
        """Remove all sequences of a request and free their slots and KV pages."""
        ...

    def running(self, request_id: int) -> Sequence[RunningSequence]:
        """Return the sequences of a request that have started and are not complete, including preempted and
        paused sequences."""
        ...


class Executor(Protocol):
    """Owns the devices. Only the engine thread uses an executor, except that other threads may use `info` and
    `stats`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def sampler(self) -> Sampler: ...

    def run(self, op: Op) -> Job[OpResult]:
        """Execute an operation other than `Sample`. Yields None between micro-batches, and a future when the
        operation waits for another thread. Returns the result."""
        ...

    def stats(self) -> dict[str, object]: ...
