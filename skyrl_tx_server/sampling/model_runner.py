"""Runs the sampling programs. `ModelRunner` holds the KV cache, but no state of sequences. Each call receives
this state as arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from jax.stages import Lowered

from skyrl_tx_server.engine.executor_protocol import SequencesLostError
from skyrl_tx_server.engine.operations import NO_LOGPROB, CsrMatrix, Sample, TopkLogprobs
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.kernels.paged_kernel import supports_head_dim
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora.lora_math import adapter_counts
from skyrl_tx_server.model.mesh import on_gpu, replicate, to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import (
    CPU_PREFILL,
    GPU_PREFILL,
    PAGE_SIZE,
    decode_widths,
    score_lengths,
    segment_ends,
)
from skyrl_tx_server.model.transformer import Params, unstack_layers
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch, DecodeLayout, DecodeProgram
from skyrl_tx_server.sampling.decode_programs import MIN_ROLLED_LAYERS, DecodePrograms
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch, DecodeOutputs, decode_steps
from skyrl_tx_server.sampling.prefill_batch import ChunkOutputs, PrefillChunk, PrefillLayout
from skyrl_tx_server.sampling.prefill_step import PrefillOutputs, prefill
from skyrl_tx_server.sampling.score_step import Scorer, at_prompt_positions
from skyrl_tx_server.sampling.sequences import SequenceState
from skyrl_tx_server.sampling.token_sampling import BatchSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """The size of the KV cache of each data-parallel rank."""

    slots: int
    pages: int  # including the null page
    page_bytes: int  # size of the part of a page on one device
    context_pages: int  # number of pages of a sequence of maximum length
    copied_pages: int  # maximum number of pages per slot that a dispatch copies; 0: a kernel reads in place

    @property
    def pages_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def copy_bytes(self) -> int:
        """The size in bytes, on one device, of all segments into which a decode dispatch copies KV pages if
        every sequence has the maximum length."""
        return self.slots * self.copied_pages * self.page_bytes


def decodes_in_place(config: ModelConfig) -> bool:
    """Return whether a GPU kernel reads KV pages in place in decode steps. On other devices, and for models
    with a sliding window or an unsupported head dimension, each dispatch copies the pages into contiguous
    segments."""
    has_windows = any(stack.attention.sliding_window is not None for stack in stacks_of(config))
    return on_gpu() and supports_head_dim(config.head_dim) and not has_windows


class ModelRunner:
    """Owns the KV cache and calls the prefill, decode and scoring programs."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        adapters: AdapterCache,
        *,
        size: CacheSize,
        dp_ranks: int,
        max_context_length: int,
        steps: int,
        dtype: np.dtype,
        processed_logprobs: bool,
    ) -> None:
        """`steps` is the number of decode steps per dispatch, at most PAGE_SIZE. With `processed_logprobs`,
        the logprobs of sampled tokens are computed after temperature (see `token_sampling`)."""
        self._config = config
        self._params = params
        self._unstacked_params = unstack_layers(config, params)
        self._adapters = adapters
        self._num_pages = size.pages * dp_ranks
        self._dtype = np.dtype(dtype)
        self._processed_logprobs = processed_logprobs
        self._scorer = Scorer(config=config, params=params, lengths=score_lengths(max_context_length))
        assert steps <= PAGE_SIZE, "a block table has only one page for positions beyond the context"
        self.steps = steps
        num_slots = size.slots * dp_ranks
        # With several processes, there is only one width. All processes must run the same program, but each
        # process would compile a program for another width at a different time. On a CPU with latent
        # attention, there is only one width, because the results of a sequence would depend on the width.
        fixed = jax.process_count() > 1 or (config.latent is not None and not on_gpu())
        widths = (size.slots,) if fixed else decode_widths(size.slots)
        shapes, ends = GPU_PREFILL if on_gpu() else CPU_PREFILL, segment_ends(max_context_length)
        table_width = ends[-1] // PAGE_SIZE + 1  # one page for positions beyond the context
        self.prefill_layout = PrefillLayout(
            shapes=shapes,
            num_slots=num_slots,
            table_width=table_width,
            # One partly filled page may be copied for each sequence and for each chunk. With several
            # data-parallel ranks, all pages of the block table of a chunk may be copied to each rank.
            max_copies=num_slots + shapes.long * (1 if dp_ranks == 1 else table_width * dp_ranks),
            vocab_size=config.vocab_size,
            adapter_counts=adapter_counts(config, adapters.num_slots, decodes=False),
        )
        self.decode_layout = DecodeLayout(
            null_pages=[rank * size.pages for rank in range(dp_ranks)],
            slots_per_rank=size.slots,
            widths=widths,
            table_width=table_width,
            steps=self.steps,
            empty_carries={
                width: jax.tree.map(partial(replicate, config), Carry.empty(width * dp_ranks))
                for width in widths
            },
            segment_ends=None if decodes_in_place(config) else ends,
            queries_per_kv_head=config.num_heads // config.num_kv_heads,
            vocab_size=config.vocab_size,
            adapter_counts=adapter_counts(config, adapters.num_slots, decodes=True),
            host_selects_filters=on_gpu(),
        )
        self._uses_rolled_programs = jax.process_count() == 1 and config.num_layers >= MIN_ROLLED_LAYERS
        self._programs = DecodePrograms(self._lower_decode)
        self._cache = self._empty_cache()
        # Other threads lower programs. They must not read `_cache`, because its arrays are deleted when the
        # engine thread donates them.
        self._cache_shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=None if config.mesh is None else leaf.sharding
            ),
            self._cache,
        )

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[ChunkOutputs]:
        """Compute the chunks, and sample the first token of each sequence that begins. Raises
        SequencesLostError if an error has destroyed the KV cache."""
        outputs: list[PrefillOutputs] = []
        try:
            for batch, settings in self.prefill_layout.batches(chunks):
                self._cache, output = prefill(
                    self._cache,
                    self._params,
                    self._adapters.arrays,
                    batch,
                    settings,
                    config=self._config,
                    tempered=self._processed_logprobs,
                )
                outputs.append(output)
            outputs = to_host(outputs)
        except Exception as error:
            self._check_cache(error)
            raise
        return self.prefill_layout.outputs(chunks, outputs)

    def first_dispatch(self, sequences: Sequence[tuple[int, SequenceState]]) -> DecodeDispatch:
        """Return a dispatch for these (slot, sequence) pairs with the narrowest compiled program that holds
        all of them. If no such program is compiled yet, the dispatch uses the widest program. This program is
        rolled (a loop runs the layers), except with several processes or fewer than MIN_ROLLED_LAYERS
        layers."""
        layout, programs = self.decode_layout, self._programs
        width = layout.width_of([slot for slot, _ in sequences])
        while True:
            dispatch = layout.dispatch(sequences, width=width)
            if programs.get(dispatch.program):
                return dispatch
            if width == layout.widths[-1]:
                break
            width = layout.widths[layout.widths.index(width) + 1]
        if self._uses_rolled_programs:
            return replace(dispatch, program=replace(dispatch.program, rolled=True))
        return dispatch

    def can_narrow(self, dispatch: DecodeDispatch) -> bool:
        """Return whether the narrowest program for the sequences of `dispatch`, after they have moved to the
        first slots, is compiled and narrower than the program of `dispatch`. If this program is narrower but
        not compiled yet, request it from `DecodePrograms`."""
        width = self.decode_layout.width_of([slot for _, slot, _ in dispatch.sequences], compacted=True)
        narrow = replace(dispatch.program, width=width)
        return width < dispatch.program.width and self._programs.request(narrow) is not None

    def transfer(self, dispatch: DecodeDispatch) -> DecodeDispatch:
        """On one GPU, begin to copy the inputs of `dispatch` to the device, and return the dispatch with the
        copied arrays. The copies take about a millisecond. The device can compute during this time. On other
        devices, return `dispatch`."""
        if not on_gpu() or self._config.mesh is not None:
            return dispatch
        batch, settings = jax.device_put((dispatch.batch, dispatch.settings))
        return replace(dispatch, batch=batch, settings=settings)

    def decode(self, dispatch: DecodeDispatch, carry: Carry) -> DecodeOutputs:
        """Start a dispatch on the device without waiting for it. `carry` is the carry of the previous
        dispatch, or an empty carry if there is no previous dispatch."""
        program = dispatch.program
        arguments = self._decode_arguments(replace(dispatch.batch, before=carry), dispatch.settings, program)
        if compiled := self._programs.get(program):
            self._cache, outputs = compiled(self._cache, *arguments)
        else:
            self._cache, outputs = decode_steps(self._cache, *arguments, **self._decode_options(program))
        # Request the unrolled program after the dispatch. The sequences wait for the rolled program, so the
        # rolled program is compiled first.
        if program.rolled:
            self._programs.request(replace(program, rolled=False), min_uses=1)
        return outputs

    def wait_for_compilation(self) -> None:
        """Wait until no decode program is being compiled in the background."""
        self._programs.wait()

    def score_prompt(self, op: Sample, adapter_slot: int) -> tuple[TopkLogprobs | None, CsrMatrix | None]:
        """Return (likeliest tokens, logprobs of the target tokens) at every prompt position. An element that
        `op` does not request is None. The likeliest tokens are placeholders (see NO_LOGPROB) at position 0
        and before the last `op.prompt_logprobs_last_n` positions."""
        if not op.topk_prompt_logprobs and op.target_prompt_tokens is None:
            return None, None
        topk, targets = self._scorer.run(
            self._adapters.arrays,
            adapter_slot,
            op.prompt,
            top=op.topk_prompt_logprobs,
            targets=op.target_prompt_tokens,
        )
        if not op.topk_prompt_logprobs:
            return None, targets
        topk = at_prompt_positions(topk)
        skipped = 0 if op.prompt_logprobs_last_n is None else len(op.prompt) - op.prompt_logprobs_last_n
        topk.token_ids[:skipped], topk.logprobs[:skipped] = 0, NO_LOGPROB
        return topk, targets

    def score_sequence(self, sequence: SequenceState, length: int) -> TopkLogprobs:
        """Return the likeliest tokens at the first `length` sampled positions of a sequence that has
        ended."""
        text = sequence.text[: len(sequence.prompt) + length - 1]
        temperature = sequence.settings.temperature
        topk, _ = self._scorer.run(
            self._adapters.arrays,
            sequence.adapter_slot,
            text,
            top=sequence.topk,
            temperature=temperature if self._processed_logprobs and temperature > 0 else 1.0,
        )
        return TopkLogprobs(token_ids=topk.token_ids[-length:], logprobs=topk.logprobs[-length:])

    def wait(self) -> None:
        """Wait until all programs that write the KV cache have ended. Raises the error of a failed
        program."""
        jax.block_until_ready(self._cache)

    def reset(self) -> None:
        """Replace the KV cache by an empty one."""
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()  # frees its memory for the new cache
        self._cache = self._empty_cache()

    def programs(self) -> Iterator[tuple[str, Lowered]]:
        """Yield (name, lowered program) for each prefill program and each unrolled decode program. On a GPU,
        the decode programs with top-k and top-p filters are left out. The programs for the fewest LoRA slots
        come first."""
        batches, layout = self.prefill_layout.dummy_batches(), self.decode_layout
        all_ends = layout.segment_ends
        ends = [None] if all_ends is None else [all_ends[:count] for count in range(1, len(all_ends) + 1)]
        decode_counts = layout.adapter_counts or (None,)
        counts = {batch.adapters.max_loras for batch, _ in batches} | {*decode_counts}
        for max_loras in sorted(counts, key=lambda count: count or 0):
            for batch, settings in batches:
                if batch.adapters.max_loras == max_loras:
                    lowered = prefill.lower(
                        self._cache_shapes,
                        self._params,
                        self._adapters.arrays,
                        batch,
                        settings,
                        config=self._config,
                        tempered=self._processed_logprobs,
                    )
                    yield f"prefill, {len(batch.tokens)} tiles", lowered
            for dispatch_ends in ends if max_loras in decode_counts else ():
                for width in reversed(layout.widths):
                    program = DecodeProgram(
                        width=width,
                        ends=dispatch_ends,
                        max_loras=max_loras,
                        filters=False if layout.host_selects_filters else None,
                    )
                    yield f"decode_steps, {width} sequences", self._lower_decode(program)

    def _lower_decode(self, program: DecodeProgram) -> Lowered:
        idle = self.decode_layout.dispatch([], width=program.width)
        batch = replace(idle.batch, adapters=replace(idle.batch.adapters, max_loras=program.max_loras))
        arguments = self._decode_arguments(batch, idle.settings, program)
        return decode_steps.lower(self._cache_shapes, *arguments, **self._decode_options(program))

    def _decode_arguments(
        self, batch: DecodeBatch, settings: BatchSettings, program: DecodeProgram
    ) -> tuple[object, ...]:
        """Return the arguments of `decode_steps` after the cache."""
        params = self._params if program.rolled else self._unstacked_params
        return params, self._adapters.arrays, batch, settings

    def _decode_options(self, program: DecodeProgram) -> dict[str, object]:
        """Return the static arguments of `decode_steps`."""
        return {
            "config": self._config,
            "steps": self.steps,
            "ends": program.ends,
            "tempered": self._processed_logprobs,
            "filters": program.filters,
            "rolled": program.rolled,
        }

    def _empty_cache(self) -> KVCache:
        return empty_cache(config=self._config, pages=self._num_pages, dtype=self._dtype)

    def _check_cache(self, error: Exception) -> None:
        """Raise SequencesLostError if a failed prefill has destroyed the donated cache. `error` is the error
        of the prefill call or of the computation that the call started, for example an out-of-memory error
        of the GPU."""
        try:
            self.wait()
        except Exception:
            raise SequencesLostError(
                f"a failed prefill has destroyed the KV cache of all running sequences: {error}"
            ) from error
