"""Sampling by an external vLLM or SGLang server, the external sampler. The routes use `ExternalSampling` in
place of the engine.

The engine still runs all other operations. It also runs the `Sample` operations that the external sampler
cannot serve exactly (see `_can_serve`). All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.engine.engine import STOPPING, EngineClient, Watcher
from skyrl_tx_server.engine.executor_protocol import EngineInfo
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    Done,
    DropSnapshot,
    Op,
    Operation,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.engine.stop_strings import load_tokenizer
from skyrl_tx_server.errors import AdapterLostError, ConfigError, SamplerError, ServerError
from skyrl_tx_server.external.adapters import AgreedTokens, ExternalAdapter, ExternalAdapters
from skyrl_tx_server.external.background_tasks import BackgroundTasks
from skyrl_tx_server.external.logprob_mismatch import LogprobDiff, LogprobMismatch, logprob_diff
from skyrl_tx_server.external.server import ExternalServer
from skyrl_tx_server.external.wire import SampleReply, SamplingRequest, cut_at_stop
from skyrl_tx_server.files.checkpoints import CheckpointStore

MIN_AGREED_TOKENS = 16
"""Samples are returned without a prior comparison of logprobs only after this many tokens of their snapshot,
or of the base model, were compared and accepted. See `_check`."""


class ExternalSampling:
    """Implements `engine.EngineClient`. Create it in a running event loop and `close` it once."""

    def __init__(
        self,
        engine: EngineClient,
        server: ExternalServer,
        checkpoints: CheckpointStore,
        options: SamplerOptions,
        *,
        adapters: Path,
        max_adapters: int,
        model_dir: Path,
    ) -> None:
        """Write adapters below `adapters`, an absolute path. While the external sampler has loaded more than
        `max_adapters` adapters, unload unused ones. Raise ConfigError if the context of the external sampler
        is shorter than the engine's."""
        if server.max_model_len is not None and server.max_model_len < engine.info.max_context_length:
            raise ConfigError(
                f"sampler_url={server.url}: the context of the sampler has {server.max_model_len} tokens, "
                f"but that of this server has {engine.info.max_context_length}; start the sampler with "
                f"--max-model-len (SGLang: --context-length) {engine.info.max_context_length}, or this "
                f"server with max_context_length={server.max_model_len}"
            )
        self._engine = engine
        self._server = server
        self._options = options
        self._model_dir = model_dir
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks()
        self._adapters = ExternalAdapters(
            server, checkpoints, self._tasks, root=adapters, max_loaded=max_adapters
        )
        self._mismatch = LogprobMismatch(limit=options.sampler_check_limit)
        self._agreed: AgreedTokens = Counter()  # for the base model
        self._verifying = asyncio.Lock()
        self._stopping = False
        self._counts = dict.fromkeys(("sampler_ok", "sampler_failed", "tokens_sampled_externally"), 0)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    def stats(self) -> dict[str, object]:
        return {
            **self._engine.stats(),
            **self._counts,
            **self._mismatch.stats(),
            "sampler_adapters": self._adapters.num_loaded,
        }

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        """Submit an operation. Call this method on the event loop. A `Sample` operation that the external
        sampler serves reports nothing to `watcher` and can be cancelled at any time."""
        operation = cast("Op", op)
        match operation:
            case Sample() if self._can_serve(operation) and not self._stopping:
                return self._submit_sample(operation, tenant)
            case SaveSampler():
                directory = self._adapters.new_directory()
                future = self._engine.submit(replace(operation, peft_directory=str(directory)), tenant=tenant)
                self._adapters.add(operation.weights, directory, future)
                return cast("Future[R]", future)
            case DropSnapshot():
                until_unused = self._adapters.drop(operation.weights)
                dropped = asyncio.run_coroutine_threadsafe(
                    self._drop(operation, until_unused, tenant), self._loop
                )
                return cast("Future[R]", dropped)
            case _:
                return self._engine.submit(op, watcher, tenant=tenant)

    async def _drop(self, op: DropSnapshot, until_unused: asyncio.Task[None], tenant: str) -> Done:
        """Drop a snapshot in the engine when no sample of the external sampler needs it for a comparison."""
        await until_unused
        return await asyncio.wrap_future(self._engine.submit(op, tenant=tenant))

    async def close(self) -> None:
        """Cancel all requests to the external sampler. Later requests go to the engine, which is stopping."""
        self._stopping = True
        await self._tasks.cancel()

    def _can_serve(self, op: Sample) -> bool:
        """Return whether the external sampler can serve the request exactly. The engine serves requests for
        logprobs of prompt tokens or of tokens that were not sampled, and requests with settings that the
        external sampler cannot apply exactly (see `Dialect.serves`)."""
        scores = (
            op.prompt_logprobs
            or op.topk_prompt_logprobs
            or op.topk_sample_logprobs
            or op.target_prompt_tokens is not None
        )
        return not scores and self._server.dialect.serves(op.settings, self.info.eos_token_ids)

    # --- samples ---

    def _submit_sample(self, op: Sample, tenant: str) -> Future[Any]:
        adapter = None if op.weights is None else self._adapters.use(op.weights)
        future = asyncio.run_coroutine_threadsafe(self._sample(op, adapter, tenant), self._loop)
        if adapter is not None:
            adapter.users.add(future)
            future.add_done_callback(adapter.users.discard)
        return future

    async def _sample(self, op: Sample, adapter: ExternalAdapter | None, tenant: str) -> SampleResult:
        task = self._tasks.run(self._sample_and_check(op, adapter, tenant))
        try:
            result = await task
        except asyncio.CancelledError:
            if self._stopping:
                raise ServerError(STOPPING) from None
            raise
        except ServerError:
            self._counts["sampler_failed"] += 1
            raise
        self._counts["sampler_ok"] += 1
        num_tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        self._counts["tokens_sampled_externally"] += num_tokens
        return result

    async def _sample_and_check(
        self, op: Sample, adapter: ExternalAdapter | None, tenant: str
    ) -> SampleResult:
        settings, info = op.settings, self.info
        request = SamplingRequest(
            prompt=op.prompt.tolist(),
            num_samples=op.num_samples,
            max_tokens=info.max_context_length - len(op.prompt)
            if settings.max_tokens is None
            else settings.max_tokens,
            stop_tokens=tuple(
                sorted({*settings.stop_token_ids, *(info.eos_token_ids if settings.stop_at_eos else ())})
            ),
            settings=settings,
        )
        tokenizer = self._tokenizer if settings.stop_strings else None
        reply = await self._request_samples(request, adapter)
        sequences = await asyncio.to_thread(
            lambda: tuple(cut_at_stop(sample, request, tokenizer) for sample in reply.samples)
        )
        await self._check(op, sequences, self._agreed if adapter is None else adapter.agreed, tenant)
        return SampleResult(
            sequences=sequences, prompt_logprobs=None, prompt_cache_hit_tokens=reply.cached_tokens
        )

    async def _request_samples(
        self, request: SamplingRequest, adapter: ExternalAdapter | None
    ) -> SampleReply:
        if adapter is None:
            return await self._server.sample(request, None)
        loaded = self._adapters.load(adapter)
        try:
            return await self._server.sample(request, await asyncio.shield(loaded))
        except AdapterLostError:
            # The external sampler may have restarted with another model, so the comparisons begin again.
            for agreed in (self._agreed, adapter.agreed):
                agreed.clear()
            if adapter.loaded is loaded:
                adapter.loaded = None
            return await self._server.sample(request, await asyncio.shield(self._adapters.load(adapter)))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model_dir)

    # --- agreement ---

    async def _check(
        self, op: Sample, sequences: Sequence[SampledSequence], agreed: AgreedTokens, tenant: str
    ) -> None:
        """Until MIN_AGREED_TOKENS tokens of the snapshot or of the base model are accepted, compare the
        longest sample of each request before the reply. In the background, compare the fraction
        `sampler_check` of all samples.

        With wrong settings, the external sampler may return correct logprobs at temperature 0 or 1 and wrong
        logprobs at other temperatures. The accepted tokens are therefore counted separately for samples at
        temperature 0 or 1 and for all other samples.
        """
        tempered = op.settings.temperature not in (0, 1)
        if agreed[tempered] < MIN_AGREED_TOKENS:
            async with self._verifying:
                if agreed[tempered] < MIN_AGREED_TOKENS:
                    agreed[tempered] += await self._verify(
                        op, max(sequences, key=lambda sequence: len(sequence.tokens)), tenant
                    )
        for sequence in sequences:
            if random.random() < self._options.sampler_check:
                self._tasks.run(self._compare(op, sequence, tenant))

    async def _verify(self, op: Sample, sequence: SampledSequence, tenant: str) -> int:
        """Compare a sample. Return the number of compared tokens. Raise SamplerError if the logprobs are
        those of another model."""
        diff = await self._compare(op, sequence, tenant)
        if diff is None:
            return 0
        if self._mismatch.is_other_model(diff):
            raise SamplerError(
                f"a reply of the sampler at {self._server.url} was refused: its logprobs of "
                f"{op.weights or 'the base model'} differ from this server's by {diff.mean:.2f} nats per "
                "token. The sampler runs another base model, does not apply the adapter, or returns "
                "logprobs to which the temperature was applied; start it as in docs/external-sampler.md"
            )
        return diff.num_tokens

    async def _compare(self, op: Sample, sequence: SampledSequence, tenant: str) -> LogprobDiff | None:
        """Compute the logprobs of a sample with the engine, and compare the logprobs of the external sampler
        with them. Return None if the context of the engine has no room for any sampled token."""
        tokens = np.concatenate([op.prompt, sequence.tokens])[: self.info.max_context_length - 1]
        num_scored = len(tokens) - len(op.prompt)
        if not num_scored:
            return None
        settings = SamplingSettings(max_tokens=1, temperature=0.0)
        score = Sample(
            weights=op.weights,
            prompt=tokens,
            settings=settings,
            prompt_logprobs=True,
            prompt_logprobs_last_n=num_scored,
        )
        result = await asyncio.wrap_future(self._engine.submit(score, tenant=tenant))
        assert isinstance(result, SampleResult) and result.prompt_logprobs is not None
        diff = logprob_diff(sequence.logprobs[:num_scored], result.prompt_logprobs[-num_scored:])
        self._mismatch.add(diff)
        return diff
