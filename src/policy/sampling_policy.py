"""Policy: one version of the weights, which samples turns and scores tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tinker

from src.core.errors import BackendError, boundary
from src.core.token_ids import TokenIds
from src.core.trajectory import StopReason, Turn


@contextmanager
def sdk_boundary(what: str) -> Iterator[None]:
    """Attributes what the SDK raises to the endpoint, in the server's own words where it gave any."""
    try:
        with boundary(BackendError, what):
            yield
    except BackendError as error:
        cause = error.__cause__
        if (
            isinstance(cause, tinker.APIStatusError)
            and isinstance(cause.body, dict)
            and "detail" in cause.body
        ):
            raise BackendError(f"{what}: {cause.body['detail']}") from cause
        raise


class Policy:
    """A frozen snapshot of the weights behind a sampling client. `version` counts optimizer batches; the start is 0."""

    def __init__(self, sampling_client: tinker.SamplingClient, version: int) -> None:
        self.version = version
        self._client = sampling_client

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        stop: list[int],
    ) -> Turn:
        """One completion, its stop token included. Raises BackendError, also when the sampler returns no logprobs."""
        params = tinker.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop)
        with sdk_boundary("sampling"):
            response = await self._client.sample(
                tinker.ModelInput.from_ints(list(prompt_ids)), num_samples=1, sampling_params=params
            )
        sequence = response.sequences[0]
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            got = "none" if sequence.logprobs is None else str(len(sequence.logprobs))
            raise BackendError(
                f"sampling: {len(sequence.tokens)} tokens came back with {got} logprobs; such a server cannot train"
            )
        if not all(map(math.isfinite, sequence.logprobs)):
            raise BackendError(
                "sampling: logprobs that are no numbers came back; the weights have diverged, go back to a checkpoint"
            )
        return Turn(
            prompt_ids=TokenIds.of(prompt_ids),
            completion_ids=list(sequence.tokens),
            logprobs=list(sequence.logprobs),
            stop_reason=StopReason(sequence.stop_reason),
            policy_version=self.version,
        )

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it: `len(token_ids) - 1` numbers."""
        with sdk_boundary("computing logprobs"):
            values = await self._client.compute_logprobs(tinker.ModelInput.from_ints(token_ids))
        known = [value for value in values[1:] if value is not None]
        if len(known) != len(token_ids) - 1:
            raise BackendError(
                f"computing logprobs: {len(token_ids)} tokens came back with {len(known)} logprobs"
            )
        return known


class NewestPolicy(Policy):
    """Each turn is sampled by the newest weights there are when it begins, and says which ones these were."""

    def __init__(self) -> None:
        """Samples once it has become a policy."""

    def become(self, policy: Policy) -> None:
        self.version = policy.version
        self._newest = policy

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        stop: list[int],
    ) -> Turn:
        return await self._newest.sample(
            prompt_ids, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop
        )

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._newest.logprobs(token_ids)
