"""Rows laid out for the device: the decode slots as one block of steps sees them. Host numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_tx_server.model.attention.kv_splits import stretches_of
from skyrl_tx_server.model.lora.lora_math import lora_indices
from skyrl_tx_server.model.shapes import bucket
from skyrl_tx_server.sampling.sample_step import MAX_STOP_TOKENS, Carry, DecodeBatch, RowSettings
from skyrl_tx_server.sampling.sequences import SequenceState, row_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A decode block as it goes to the device."""

    live: Sequence[tuple[int, SequenceState]]  # with their slots
    rows: DecodeBatch
    settings: RowSettings
    ends: tuple[int, ...] | None

    def same_program(self, other: Block) -> bool:
        return self.ends == other.ends and self.rows.adapters.most == other.rows.adapters.most


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLayout:
    """The sizes of a block's arrays."""

    empty_tables: np.ndarray  # [slots, W] int32, in each slot's the page of its device that is nobody's
    nothing_before: Carry  # on the device, for a block that follows none
    ends: (
        tuple[int, ...] | None
    )  # of the segments that rows are read in; None: a kernel reads their pages as they lie
    heads_together: int  # query heads that share a key-value head
    devices: int  # over which the slots are divided
    vocab_size: int
    bank: int | None  # entries of adapters, where programs are compiled for them (`low_rank`)

    def block(self, live: Sequence[tuple[int, SequenceState]]) -> Block:
        """The next block of these rows, with their slots."""
        slots = len(self.empty_tables)
        tables = self.empty_tables.copy()
        tokens, positions, remaining = np.zeros((3, slots), np.int32)
        adapters = np.full(slots, live[0][1].adapter_slot if live else 0, np.int32)
        stop_tokens = np.full((slots, MAX_STOP_TOKENS), -1, np.int32)
        sitting: list[SequenceState | None] = [None] * slots
        for slot, row in live:
            sitting[slot] = row
            tables[slot, : len(row.pages)] = row.pages
            tokens[slot] = -1 if row.coming else row.tokens[-1]
            positions[slot], remaining[slot] = row.position, row.remaining
            adapters[slot] = row.adapter_slot
            stop_tokens[slot, : len(row.stop_tokens)] = row.stop_tokens
        ends = self.ends
        return Block(
            live=live,
            rows=DecodeBatch(
                tokens=tokens,
                before=self.nothing_before,
                positions=positions,
                remaining=remaining,
                tables=tables,
                stretches=stretches_of(tables, positions, group=self.heads_together, devices=self.devices)
                if ends is None
                else None,
                adapters=lora_indices(adapters, bank=self.bank),
                stop_tokens=stop_tokens,
            ),
            settings=row_settings(sitting, self.vocab_size),
            ends=ends and ends[: 1 + ends.index(bucket(int(positions.max()), ends))],
        )
