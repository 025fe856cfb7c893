"""The decode batch: the sequences in decode slots, as arrays for one dispatch.

The batch holds the first `width` slots of each data-parallel rank. The time of a dispatch grows with its
width, so programs are compiled for several widths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.engine.operations import MAX_STOP_TOKENS
from skyrl_tx_server.model.attention.kv_splits import kv_splits_of
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.shapes import bucket
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch
from skyrl_tx_server.sampling.sequences import SequenceState, batch_settings
from skyrl_tx_server.sampling.token_sampling import BatchSettings, is_filtered


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeProgram:
    """The properties of a dispatch that select a compiled program of `decode_steps`."""

    width: int  # number of slots of each data-parallel rank in the batch
    ends: tuple[int, ...] | None  # argument of `decode_steps`; None: a kernel reads the pages in place
    max_loras: int | None  # maximum number of LoRA slots that the batch uses; None: any number
    rolled: bool = False  # whether a loop runs the layers
    filters: bool | None = None  # argument of `sample_tokens`


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeDispatch:
    """The arguments of one call of `decode_steps`."""

    sequences: Sequence[tuple[int, int, SequenceState]]  # (index in the batch, slot, sequence)
    batch: DecodeBatch
    settings: BatchSettings
    program: DecodeProgram


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLayout:
    """The sizes and constant inputs of all dispatches."""

    null_pages: Sequence[int]  # the null page of each data-parallel rank
    slots_per_rank: int
    widths: tuple[int, ...]  # widths of programs, ascending; the last width holds all slots of a rank
    table_width: int  # number of entries of a block table
    steps: int  # number of decode steps of a dispatch
    empty_carries: Mapping[int, Carry]  # width -> carry on the device, for a dispatch without a previous one
    # the positions at which the segments of `decode_steps` end; None: a kernel reads the pages in place
    segment_ends: tuple[int, ...] | None
    queries_per_kv_head: int
    vocab_size: int
    adapter_counts: tuple[int, ...] | None  # a result of `lora_math.adapter_counts`
    host_selects_filters: bool  # whether there are separate programs with and without top-k and top-p filters

    def width_of(self, slots: Sequence[int], *, compacted: bool = False) -> int:
        """Return the smallest width that holds these slots. With `compacted`, return the smallest width
        that holds the sequences of these slots after they have moved to the first slots of their ranks."""
        ranks = Counter(slot // self.slots_per_rank for slot in slots)
        needed = max(ranks.values()) if compacted else max(slot % self.slots_per_rank for slot in slots) + 1
        return bucket(needed, self.widths)

    def dispatch(self, sequences: Sequence[tuple[int, SequenceState]], *, width: int) -> DecodeDispatch:
        """Return the next dispatch for these (slot, sequence) pairs. A batch of this `width` must hold all
        these slots."""
        rows = width * len(self.null_pages)
        tables = np.repeat(np.array(self.null_pages, np.int32), width)[:, None].repeat(
            self.table_width, axis=1
        )
        tokens, positions, remaining = np.zeros((3, rows), np.int32)
        adapters = np.full(rows, sequences[0][1].adapter_slot if sequences else 0, np.int32)
        stop_tokens = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
        by_index: list[SequenceState | None] = [None] * rows
        indexed = []
        for slot, sequence in sequences:
            rank, place = divmod(slot, self.slots_per_rank)
            assert place < width
            index = rank * width + place
            indexed.append((index, slot, sequence))
            by_index[index] = sequence
            tables[index, : len(sequence.block_table)] = sequence.block_table
            tokens[index] = -1 if sequence.pending_tokens else sequence.tokens[-1]
            positions[index], remaining[index] = sequence.position, sequence.remaining
            adapters[index] = sequence.adapter_slot
            stop_tokens[index, : len(sequence.stop_tokens)] = sequence.stop_tokens
        ends, splits = self.segment_ends, None
        if ends is None:
            ranks = len(self.null_pages)
            ends_B = positions + np.minimum(remaining, self.steps)
            splits = kv_splits_of(tables, ends_B, group=self.queries_per_kv_head, devices=ranks)
        else:
            ends = ends[: 1 + ends.index(bucket(int(positions.max()), ends))]
        loras = lora_indices(adapters, counts=self.adapter_counts)
        settings = batch_settings(by_index, self.vocab_size)
        filters = None
        if self.host_selects_filters:
            random = np.asarray(settings.temperatures) > 0
            filters = bool(np.any(is_filtered(settings, random, self.vocab_size)))
        return DecodeDispatch(
            sequences=indexed,
            batch=DecodeBatch(
                tokens=tokens,
                before=self.empty_carries[width],
                positions=positions,
                remaining=remaining,
                tables=tables,
                splits=splits,
                adapters=loras,
                stop_tokens=stop_tokens,
            ),
            settings=settings,
            program=DecodeProgram(width=width, ends=ends, max_loras=loras.max_loras, filters=filters),
        )
