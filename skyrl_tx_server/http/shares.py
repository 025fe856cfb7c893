"""A tenant's view of the engine. It limits the tokens in flight, which are the tokens of the tenant's waiting
and running operations."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from skyrl_tx_server.engine.engine import EngineClient, Watcher
from skyrl_tx_server.engine.executor_protocol import EngineInfo
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    Sample,
    SaveExternal,
    SaveSampler,
    SaveWeights,
)
from skyrl_tx_server.errors import CapacityError, UserError

LEAST_TOKENS = 256
"""Each `Sample` and each `ForwardBackward` operation counts as at least this number of tokens, so that the
quota also limits the number of operations."""
MAX_STEPS = 10_000
"""The maximum number of waiting and running operations of a tenant among `OptimStep`, `SaveWeights`,
`SaveSampler`, `SaveExternal` and the `LoadWeights` that do not create a model. These operations have no
tokens."""
VALUES_PER_TOKEN = 8
"""This number of further target tokens or of top-k logprobs counts as one token, so that the quota limits
their memory."""


class EngineShare:
    """Implements `engine.EngineClient` for one tenant."""

    def __init__(self, engine: EngineClient, tenant: str, max_tokens: int) -> None:
        self._engine = engine
        self._tenant = tenant
        self._max_tokens = max_tokens
        self._lock = threading.Lock()  # futures are resolved on the engine's thread
        self._tokens = 0
        self._steps = 0

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    def stats(self) -> dict[str, object]:
        with self._lock:
            return {"tokens_in_flight": self._tokens, "max_tokens_in_flight": self._max_tokens}

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        """Submit `op` for this tenant. The argument `tenant` is ignored. Raise UserError if `op` alone
        exceeds the quota, and CapacityError if `op` and the tokens in flight together exceed it or if there
        are MAX_STEPS such operations already."""
        num_tokens = _num_tokens(op, self.info.max_context_length)
        is_step = _is_step(op)
        if num_tokens > self._max_tokens:
            raise UserError(
                f"the request has {num_tokens} tokens, more than tenant_max_tokens={self._max_tokens}; send "
                f"smaller requests"
            )
        with self._lock:
            if self._tokens + num_tokens > self._max_tokens:
                raise CapacityError(
                    f"you have {self._tokens} tokens in flight and the request adds {num_tokens}, above "
                    f"tenant_max_tokens={self._max_tokens}; wait for earlier requests to finish"
                )
            if is_step and self._steps >= MAX_STEPS:
                raise CapacityError(
                    f"you have {self._steps} waiting operations; wait for earlier requests to finish"
                )
            self._tokens += num_tokens
            self._steps += is_step
        try:
            future = self._engine.submit(op, watcher, tenant=self._tenant)
        except BaseException:
            self._release(num_tokens, is_step)
            raise
        future.add_done_callback(lambda _: self._release(num_tokens, is_step))
        return future

    def _release(self, num_tokens: int, is_step: bool) -> None:
        with self._lock:
            self._tokens -= num_tokens
            self._steps -= is_step


def _is_step(op: Operation[object]) -> bool:
    """Whether MAX_STEPS limits the number of operations like `op`."""
    return isinstance(op, OptimStep | SaveWeights | SaveSampler | SaveExternal) or (
        isinstance(op, LoadWeights) and not op.create
    )


def _num_tokens(op: Operation[object], max_context_length: int) -> int:
    """Return the number of tokens that the quota counts: for a `Sample`, the prompt and `num_samples`
    completions of maximum length; for a `ForwardBackward`, the tokens of all datums. Further target tokens
    and top-k logprobs of a position count too (VALUES_PER_TOKEN). Other operations count 0."""
    match op:
        case Sample():
            longest = (
                max_context_length - len(op.prompt)
                if op.settings.max_tokens is None
                else op.settings.max_tokens
            )
            sampled = op.num_samples * max(0, longest)
            num_values = len(op.prompt) * op.topk_prompt_logprobs + sampled * op.topk_sample_logprobs
            return max(LEAST_TOKENS, len(op.prompt) + sampled + num_values // VALUES_PER_TOKEN)
        case ForwardBackward():
            sizes = ((len(datum.tokens), datum.target_tokens.size) for datum in op.data)
            counts = (tokens + (targets - tokens) // VALUES_PER_TOKEN for tokens, targets in sizes)
            return max(LEAST_TOKENS, sum(counts))
        case _:
            return 0
