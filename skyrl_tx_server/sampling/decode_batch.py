"""The decode batch: the sequences in decode slots as host arrays for one dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.model.attention.kv_splits import stretches_of
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.shapes import bucket
from skyrl_tx_server.sampling.decode_step import Carry, DecodeBatch
from skyrl_tx_server.sampling.sequences import SequenceState, batch_settings
from skyrl_tx_server.sampling.token_sampling import MAX_STOP_TOKENS, BatchSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeDispatch:
    """The arguments of one call of `decode_steps`."""

    sequences: Sequence[tuple[int, SequenceState]]  # with their slots
    batch: DecodeBatch
    settings: BatchSettings
    ends: tuple[int, ...] | None  # static argument of the program

    def same_program(self, other: DecodeDispatch) -> bool:
        return self.ends == other.ends and self.batch.adapters.most == other.batch.adapters.most


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLayout:
    """The sizes of a dispatch's arrays."""

    empty_tables: np.ndarray  # [slots, W] int32, in each row the null page of the slot's data-parallel rank
    empty_carry: Carry  # on the device, for a dispatch without a predecessor
    segment_ends: tuple[int, ...] | None  # all possible ends; None: a kernel reads the pages in place
    queries_per_kv_head: int
    dp_ranks: int
    vocab_size: int
    num_lora_slots: int | None  # None: programs do not depend on the number of adapters (see `lora_math`)

    def dispatch(self, sequences: Sequence[tuple[int, SequenceState]]) -> DecodeDispatch:
        """Return the next dispatch of these sequences, given with their slots."""
        num_slots = len(self.empty_tables)
        tables = self.empty_tables.copy()
        tokens, positions, remaining = np.zeros((3, num_slots), np.int32)
        adapters = np.full(num_slots, sequences[0][1].adapter_slot if sequences else 0, np.int32)
        stop_tokens = np.full((num_slots, MAX_STOP_TOKENS), -1, np.int32)
        by_slot: list[SequenceState | None] = [None] * num_slots
        for slot, sequence in sequences:
            by_slot[slot] = sequence
            tables[slot, : len(sequence.block_table)] = sequence.block_table
            tokens[slot] = -1 if sequence.pending_tokens else sequence.tokens[-1]
            positions[slot], remaining[slot] = sequence.position, sequence.remaining
            adapters[slot] = sequence.adapter_slot
            stop_tokens[slot, : len(sequence.stop_tokens)] = sequence.stop_tokens
        ends, splits = self.segment_ends, None
        if ends is None:
            splits = stretches_of(tables, positions, group=self.queries_per_kv_head, devices=self.dp_ranks)
        return DecodeDispatch(
            sequences=sequences,
            batch=DecodeBatch(
                tokens=tokens,
                before=self.empty_carry,
                positions=positions,
                remaining=remaining,
                tables=tables,
                splits=splits,
                adapters=lora_indices(adapters, bank=self.num_lora_slots),
                stop_tokens=stop_tokens,
            ),
            settings=batch_settings(by_slot, self.vocab_size),
            ends=ends and ends[: 1 + ends.index(bucket(int(positions.max()), ends))],
        )
