"""Rollouts by an external vLLM or SGLang: stands where the engine stands for the routes, and passes on what the engine does itself.

What the external server cannot give exactly (see `_is_plain`) the engine samples. Lives on the event loop's thread.
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

import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.config.sampler_options import SamplerOptions
from skyrl_tx_server.engine.engine import STOPPING, EngineInfo, EngineSide, Watcher
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    DropSnapshot,
    Op,
    OpResult,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.engine.stop_strings import load_tokenizer
from skyrl_tx_server.errors import AdapterLostError, ConfigError, SamplerError, ServerError
from skyrl_tx_server.external.adapters import Agreed, ExternalAdapter, ExternalAdapters
from skyrl_tx_server.external.background_tasks import Errands
from skyrl_tx_server.external.logprob_mismatch import Agreement, LogprobDiff, gap
from skyrl_tx_server.external.server import ExternalServer
from skyrl_tx_server.external.wire import Answer, SamplingRequest, ended
from skyrl_tx_server.files.checkpoints import CheckpointStore

PROOF_TOKENS = 16
"""So many tokens of a snapshot must have agreed before samples of it are passed on unseen."""


class ExternalSampling:
    """Implements `engine.EngineSide`. Made in a running event loop; `close` it once."""

    def __init__(
        self,
        engine: EngineSide,
        server: ExternalServer,
        checkpoints: CheckpointStore,
        options: SamplerOptions,
        *,
        adapters: Path,
        max_adapters: int,
        model_dir: Path,
    ) -> None:
        """Write adapters below `adapters`, an absolute path, and keep at most `max_adapters` of them loaded in the sampler."""
        if server.max_model_len is not None and server.max_model_len < engine.info.max_context_length:
            raise ConfigError(
                f"sampler_url={server.url}: its context is {server.max_model_len} tokens, this server's {engine.info.max_context_length}; "
                f"start it with --max-model-len (SGLang: --context-length) {engine.info.max_context_length}, or this one with "
                f"max_context_length={server.max_model_len}"
            )
        self._engine = engine
        self._server = server
        self._options = options
        self._model_dir = model_dir
        self._loop = asyncio.get_running_loop()
        self._errands = Errands()
        self._adapters = ExternalAdapters(
            server, checkpoints, self._errands, root=adapters, max_loaded=max_adapters
        )
        self._agreement = Agreement(limit=options.sampler_check_limit)
        self._agreed: Agreed = Counter()  # of the base model
        self._proving = asyncio.Lock()
        self._stopping = False
        self._counts = dict.fromkeys(("sampler_ok", "sampler_failed", "tokens_sampled_elsewhere"), 0)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def stats(self) -> dict[str, object]:
        return {
            **self._engine.stats(),
            **self._counts,
            **self._agreement.stats(),
            "sampler_adapters": self._adapters.num_loaded,
        }

    def submit(
        self, op: Op, watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[OpResult]:
        """Called on the event loop. A sample made elsewhere is shown to no watcher before it is whole, and can be cancelled at any time."""
        match op:
            case Sample() if self._is_plain(op) and not self._stopping:
                return self._submit_sample(op, tenant)
            case SaveSampler():
                directory = self._adapters.new_directory()
                future = self._engine.submit(replace(op, peft_directory=str(directory)), tenant=tenant)
                self._adapters.add(op.weights, directory, future)
                return future
            case DropSnapshot():
                unused = self._adapters.drop(op.weights)
                return asyncio.run_coroutine_threadsafe(self._drop(op, unused, tenant), self._loop)
        return self._engine.submit(op, watcher, tenant=tenant)

    async def _drop(self, op: DropSnapshot, unused: asyncio.Task[None], tenant: str) -> OpResult:
        """The engine must keep what samples made elsewhere may yet be compared with."""
        await unused
        return await asyncio.wrap_future(self._engine.submit(op, tenant=tenant))

    async def close(self) -> None:
        """Let go of every request that waits for the external server; later ones are the engine's, which is stopping."""
        self._stopping = True
        await self._errands.cancel()

    def _is_plain(self, op: Sample) -> bool:
        """Whether the external server can give all that is asked for: it has no log-probabilities of prompts and of other tokens for us."""
        scores = (
            op.prompt_logprobs
            or op.topk_prompt_logprobs
            or op.topk_sample_logprobs
            or op.target_prompt_tokens is not None
        )
        return not scores and self._server.dialect.serves(op.settings, self.info.eos_token_ids)

    # --- samples ----------------------------------------------------------------------------------------------------

    def _submit_sample(self, op: Sample, tenant: str) -> Future[OpResult]:
        adapter = None if op.weights is None else self._adapters.use(op.weights)
        future: Future[OpResult] = asyncio.run_coroutine_threadsafe(
            self._sample(op, adapter, tenant), self._loop
        )
        if adapter is not None:
            adapter.users.add(future)
            future.add_done_callback(adapter.users.discard)
        return future

    async def _sample(self, op: Sample, adapter: ExternalAdapter | None, tenant: str) -> SampleResult:
        sampled = self._errands.run(self._sampled(op, adapter, tenant))
        try:
            result = await sampled
        except asyncio.CancelledError:
            if self._stopping:
                raise ServerError(STOPPING) from None
            raise
        except ServerError:
            self._counts["sampler_failed"] += 1
            raise
        self._counts["sampler_ok"] += 1
        self._counts["tokens_sampled_elsewhere"] += sum(len(sequence.tokens) for sequence in result.sequences)
        return result

    async def _sampled(self, op: Sample, adapter: ExternalAdapter | None, tenant: str) -> SampleResult:
        settings, info = op.settings, self.info
        ask = SamplingRequest(
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
        answer = await self._answer(ask, adapter)
        sequences = await asyncio.to_thread(
            lambda: tuple(ended(drawn, ask, tokenizer) for drawn in answer.samples)
        )
        await self._check(op, sequences, self._agreed if adapter is None else adapter.agreed, tenant)
        return SampleResult(
            sequences=sequences, prompt_logprobs=None, prompt_cache_hit_tokens=answer.cached_tokens
        )

    async def _answer(self, ask: SamplingRequest, adapter: ExternalAdapter | None) -> Answer:
        if adapter is None:
            return await self._server.sample(ask, None)
        loaded = self._adapters.load(adapter)
        try:
            return await self._server.sample(ask, await asyncio.shield(loaded))
        except AdapterLostError:
            for agreed in (self._agreed, adapter.agreed):  # it was restarted, and may run something else now
                agreed.clear()
            if adapter.loaded is loaded:
                adapter.loaded = None
            return await self._server.sample(ask, await asyncio.shield(self._adapters.load(adapter)))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model_dir)

    # --- agreement --------------------------------------------------------------------------------------------------

    async def _check(
        self, op: Sample, sequences: Sequence[SampledSequence], agreed: Agreed, tenant: str
    ) -> None:
        """Compare a share of the samples behind their results' back, and the first of a snapshot before anyone sees them.

        Log-probabilities of a temperature that changes the distribution may be wrong where others are right: they are a first of their own.
        """
        tempered = op.settings.temperature not in (0, 1)
        if agreed[tempered] < PROOF_TOKENS:
            async with self._proving:
                if agreed[tempered] < PROOF_TOKENS:
                    agreed[tempered] += await self._prove(
                        op, max(sequences, key=lambda sequence: len(sequence.tokens)), tenant
                    )
        for sequence in sequences:
            if random.random() < self._options.sampler_check:
                self._errands.run(self._compare(op, sequence, tenant))

    async def _prove(self, op: Sample, sequence: SampledSequence, tenant: str) -> int:
        """How many tokens agree. SamplerError where they do not."""
        found = await self._compare(op, sequence, tenant)
        if found is None:
            return 0
        if self._agreement.is_gross(found):
            raise SamplerError(
                f"the sampler at {self._server.url} is not used: its log-probabilities of {op.weights or 'the base model'} differ from "
                f"ours by {found.mean:.2f} nats per token. It runs another base model, leaves the adapter out, or reports them after "
                "temperature; start it as docs/external-sampler.md says"
            )
        return found.num_tokens

    async def _compare(self, op: Sample, sequence: SampledSequence, tenant: str) -> LogprobDiff | None:
        """Let the engine score a sample again. None: the text leaves no room in the context to score any of it."""
        text = np.concatenate([op.prompt, sequence.tokens])[: self.info.max_context_length - 1]
        scored = len(text) - len(op.prompt)
        if not scored:
            return None
        settings = SamplingSettings(max_tokens=1, temperature=0.0)
        score = Sample(
            weights=op.weights,
            prompt=text,
            settings=settings,
            prompt_logprobs=True,
            prompt_logprobs_last_n=scored,
        )
        result = await asyncio.wrap_future(self._engine.submit(score, tenant=tenant))
        assert isinstance(result, SampleResult) and result.prompt_logprobs is not None
        found = gap(sequence.logprobs[:scored], result.prompt_logprobs[-scored:])
        self._agreement.add(found)
        return found
