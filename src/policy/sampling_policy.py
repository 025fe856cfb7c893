"""Policies, which sample the turns of the agent, and wrappers that add behaviour to a policy."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import tinker

from src.core.errors import BackendError, boundary
from src.core.token_ids import TokenIds
from src.core.trajectory import StopReason, Turn


@contextmanager
def sdk_boundary(action: str) -> Generator[None]:
    """Convert errors of the SDK to BackendError, with the error message of the server if there is one."""
    try:
        with boundary(BackendError, action):
            yield
    except BackendError as error:
        cause = error.__cause__
        if (
            isinstance(cause, tinker.APIStatusError)
            and isinstance(cause.body, dict)
            and "detail" in cause.body
        ):
            raise BackendError(f"{action}: {cause.body['detail']}") from cause
        if isinstance(cause, tinker.RequestFailedError):  # The end of the SDK's message names its classes.
            message = str(cause).removeprefix("Request failed: ").partition(" for self.request_id=")[0]
            raise BackendError(f"{action}: {message}") from cause
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One completion to sample."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    # Below 1 only in evaluations: the returned logprobs ignore top_p, and training needs the logprobs of the
    # distribution that was sampled from.
    top_p: float = 1.0
    seed: int | None = None  # None: the endpoint chooses a seed
    stop_token_ids: Sequence[int] = ()


class Policy(Protocol):
    """Samples completions.

    `version` is the number of training steps that produced the weights. The initial weights have version 0.
    """

    @property
    def version(self) -> int: ...

    async def sample(self, request: SampleRequest) -> Turn:
        """Return one completion with its stop token, if it has one. Raises BackendError if sampling fails."""
        ...


class ReferenceModel(Protocol):
    """Scores token sequences with weights that training does not change."""

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """Return a list of `len(token_ids) - 1` numbers: `log p(token | tokens before it)` in nats for each
        token except the first.
        """
        ...


class PolicyWrapper:
    """A policy that delegates to another policy.

    Subclasses override `sample` to add behaviour. A wrapper can wrap another wrapper.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def version(self) -> int:
        return self.policy.version

    async def sample(self, request: SampleRequest) -> Turn:
        return await self.policy.sample(request)


class TopPPolicy(PolicyWrapper):
    """Samples from the most likely tokens that together have the probability `top_p`, for evaluations."""

    def __init__(self, policy: Policy, top_p: float) -> None:
        super().__init__(policy)
        self._top_p = top_p

    async def sample(self, request: SampleRequest) -> Turn:
        return await super().sample(replace(request, top_p=self._top_p))


class NewestPolicy(PolicyWrapper):
    """Samples each turn with the policy that was set last. `set` must be called before the first turn."""

    def __init__(self) -> None: ...

    def set(self, policy: Policy) -> None:
        self.policy = policy


class SamplingClient(Protocol):
    """The methods of `tinker.SamplingClient` that `TinkerPolicy` uses."""

    def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> Awaitable[tinker.SampleResponse]: ...

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Awaitable[Sequence[float | None]]: ...


class TinkerPolicy:
    """A sampling client with frozen weights. Implements `Policy` and `ReferenceModel`."""

    def __init__(self, sampling_client: SamplingClient, version: int) -> None:
        self.version = version
        self._client = sampling_client

    async def sample(self, request: SampleRequest) -> Turn:
        """Return one completion.

        Raises BackendError if sampling fails or a token has no finite logprob.
        """
        params = tinker.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop=list(request.stop_token_ids),
        )
        with sdk_boundary("sampling"):
            response = await self._client.sample(
                tinker.ModelInput.from_ints(list(request.prompt_ids)), num_samples=1, sampling_params=params
            )
        sequence = response.sequences[0]
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            num_logprobs = 0 if sequence.logprobs is None else len(sequence.logprobs)
            raise BackendError(
                f"sampling: the server returned {len(sequence.tokens)} tokens with {num_logprobs} logprobs; "
                "training needs a logprob for every token"
            )
        if not all(map(math.isfinite, sequence.logprobs)):
            raise BackendError(
                "sampling: the server returned logprobs that are not finite, so the weights have diverged; "
                "resume from a checkpoint"
            )
        return Turn(
            prompt_ids=TokenIds.wrap(request.prompt_ids),
            completion_ids=list(sequence.tokens),
            logprobs=list(sequence.logprobs),
            stop_reason=StopReason(sequence.stop_reason),
            policy_version=self.version,
        )

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        with sdk_boundary("computing logprobs"):
            values = await self._client.compute_logprobs(tinker.ModelInput.from_ints(token_ids))
        numbers = [value for value in values[1:] if value is not None]
        if len(numbers) != len(token_ids) - 1:
            raise BackendError(
                f"computing logprobs: the server returned {len(numbers)} logprobs for the "
                f"{len(token_ids) - 1} tokens after the first token"
            )
        if not all(map(math.isfinite, numbers)):
            raise BackendError(
                "computing logprobs: the server returned logprobs that are not finite; check the weights of "
                "the model that computes them"
            )
        return numbers
