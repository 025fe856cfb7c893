"""The decode slots: which row sits where, on which pages, and the conversation with the sampling programs, once per block.

The only device state is the key-value cache. Everything else about a row lives here and travels with each dispatch, so that a failed
program costs the rows their cache and nothing more.

What was computed is remembered (`pages`): a prompt that begins like anything under the same weights is prefilled from there on only, be it
the next turn of a conversation, another member of a group or a common system prompt. When rows need more pages than there are, the one
that came last is set aside; it is computed again when there is room, and samples what it would have sampled. Of several tenants the one
with the most pages gives them up.

A paused row leaves its slot to others and keeps its pages, so that it goes on with the same bits in any slot of its device. When pages run
out, paused rows lose theirs first; such a row is computed again when it is admitted.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import numpy as np
from jax.stages import Lowered
from tokenizers import Tokenizer

from skyrl_tx_server.distributed.multihost import ALONE, Hosts
from skyrl_tx_server.engine.engine import FailedRow, FinishedRow, PrefillResult, RowsLostError, RunningRow
from skyrl_tx_server.engine.operations import NO_LOGPROB, CsrMatrix, Sample, SampledSequence, TopkLogprobs
from skyrl_tx_server.engine.scheduler import PrefillRequest
from skyrl_tx_server.engine.stop_strings import load_tokenizer
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.executor.cache_size import CacheSize, kernel_decodes
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.lora.lora_math import adapter_count_buckets
from skyrl_tx_server.model.mesh import on_gpu, replicate, to_host
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import (
    BLOCK,
    CPU_PREFILL,
    GPU_PREFILL,
    PAGE,
    blocks_of,
    score_lengths,
    segment_ends,
)
from skyrl_tx_server.model.transformer import Params, unstack_layers
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.block_tables import take_tables
from skyrl_tx_server.sampling.decode_batch import Block, DecodeLayout
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk, PrefillLayout, PrefillOutputs
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache, common_length
from skyrl_tx_server.sampling.sample_step import BlockOutputs, Carry, PassOutputs, decode_block, prefill
from skyrl_tx_server.sampling.score_step import Scorer, at_prompt_positions
from skyrl_tx_server.sampling.sequences import SequenceState, stop_tokens_of

logger = logging.getLogger(__name__)

BLOCKS_ASIDE = 32
"""A row that was set aside for so many decode blocks comes before every new sample, else before those of its own tenant only."""


@dataclass(kw_only=True, slots=True)
class PendingPrefill:
    """A prompt on its way."""

    hit_tokens: int  # of it that lay in the cache when it came
    logprobs: np.ndarray  # [P] by position, NaN where they are not known or not wanted
    done: int = 0  # after how many tokens they are known


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillingRequest:
    """A request whose prompt is being computed."""

    admit: PrefillRequest
    piece: PrefillChunk
    topk: TopkLogprobs | None = None  # of the prompt
    targets: CsrMatrix | None = None


@dataclass(kw_only=True, slots=True)
class InFlightBatch:
    """A decode block on the device."""

    block: Block
    outputs: BlockOutputs
    sampled: BlockOutputs | None = None  # the outputs, in host memory
    next: Block | None = None  # what can follow at once


class BatchRunner:
    """Rows join by `admit`, all of them advance by `decode` and `collect`, and each leaves when it is complete.

    A block can begin before the host has looked at the one before it: the last tokens stay on the device (`Carry`), and where a row will be
    unless it ends the host knows beforehand. Rows that did end are in the next block without effect.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        bank: AdapterCache,
        *,
        size: CacheSize,
        groups: int,
        max_context_length: int,
        block: int,
        dtype: np.dtype,
        model_dir: Path,
        tempered_logprobs: bool,
        hosts: Hosts = ALONE,
    ) -> None:
        """Each of `groups` devices has slots and pages of this size."""
        self._config = config
        self._params = params
        self._params_apart = unstack_layers(config, params)
        self._bank = bank
        self._max_context_length = max_context_length
        self._dtype = np.dtype(dtype)
        self._model_dir = model_dir
        self._tempered = tempered_logprobs
        self._hosts = hosts
        self._block = min(block, PAGE)
        self._size, self._groups = size, groups
        self._rows: list[SequenceState | None] = [None for _ in range(size.slots * groups)]
        self._aside: list[SequenceState] = []  # waiting for pages, oldest first
        self._paused: dict[
            tuple[int, int], tuple[SequenceState, PrefixCache]
        ] = {}  # by ticket and index, with the pages of the device; longest ago first
        self._pages: list[PrefixCache] = []  # by group
        self._set_aside_count = self._pause_count = self._ahead_count = 0
        self._flight: InFlightBatch | Exception | None = (
            None  # the block under way, or why it could not begin
        )
        self._resumed: FinishedRow | FailedRow | None = None  # over as soon as it was computed again
        self._begun: dict[int, PendingPrefill] = {}  # by ticket
        self._tokenizer: Tokenizer | None = None
        shapes, ends = GPU_PREFILL if on_gpu() else CPU_PREFILL, segment_ends(max_context_length)
        table_width = ends[-1] // PAGE + 1  # a block may reach beyond the context
        programs_for = bank.num_entries if on_gpu() else None
        self._layout = PrefillLayout(
            shapes=shapes,
            num_slots=len(self._rows),
            table_width=table_width,
            # a page for each row that parts from another in it, and whole tables where they do so on different devices
            max_copies=len(self._rows) + shapes.long * (1 if groups == 1 else table_width * groups),
            vocab_size=config.vocab_size,
            bank=programs_for,
        )
        self._blocks = DecodeLayout(
            empty_tables=np.repeat(np.arange(groups, dtype=np.int32) * size.pages, size.slots)[
                :, None
            ].repeat(table_width, axis=1),
            nothing_before=jax.tree.map(partial(replicate, config), Carry.of_none(len(self._rows))),
            ends=None if kernel_decodes(config) else ends,
            heads_together=config.num_heads // config.num_kv_heads,
            devices=groups,
            vocab_size=config.vocab_size,
            bank=programs_for,
        )
        self._scorer = Scorer(config=config, params=params, lengths=score_lengths(max_context_length))
        self._forget_everything()

    @property
    def num_slots(self) -> int:
        return len(self._rows)

    @property
    def rows_decoding(self) -> int:
        """Those that are set aside among them: their slots are kept free."""
        return sum(row is not None for row in self._rows) + len(self._aside)

    def stats(self) -> dict[str, object]:
        return {
            "cache_pages": (self._size.pages - 1) * self._groups,
            "cache_pages_free": sum(pages.num_free for pages in self._pages),
            "cache_pages_cached": sum(pages.num_remembered for pages in self._pages),
            "sequences_preempted": len(self._aside),
            "num_preemptions": self._set_aside_count,
            "sequences_paused": len(self._paused),
            "num_pauses": self._pause_count,
            "decode_dispatches_ahead": self._ahead_count,
        }

    def admit(self, admits: Sequence[PrefillRequest]) -> list[PrefillResult | None]:
        """Compute the prompts of the first few of `admits` together, give their rows a slot each and sample the first token of each row;
        None for a long prompt of which only a piece was computed."""
        if any(row.tenant == admits[0].tenant or row.blocks_aside >= BLOCKS_ASIDE for row in self._aside):
            raise CapacityError("samples that were set aside for want of pages come first")
        self._forget_flight_of_nobody()
        joining: list[PrefillingRequest | int] = []  # a slot: of a row that needs no pass
        try:
            for admit in admits:
                beside = [other.piece for other in joining if isinstance(other, PrefillingRequest)]
                one = self._sit_again(admit, beside)
                if one is None:
                    one = self._next_piece(admit, beside)
                if one is None:
                    break
                joining.append(one)
        except CapacityError:
            if not joining:
                raise
        except Exception:
            for one in joining:
                if isinstance(one, PrefillingRequest):
                    self._give_back(one.piece)
                    self._bank.unpin(one.piece.weights)
                else:
                    self._leave(one)
            raise
        pieces = [one for one in joining if isinstance(one, PrefillingRequest)]
        try:
            outputs = iter(self._prefill([one.piece for one in pieces]) if pieces else [])
            return [
                self._settle(one, next(outputs))
                if isinstance(one, PrefillingRequest)
                else _nothing_new(admits[at])
                for at, one in enumerate(joining)
            ]
        except RowsLostError:
            raise
        except Exception:
            for one in joining:
                if isinstance(one, int):
                    self._leave(one)
            raise
        finally:
            for one in pieces:
                self._bank.unpin(one.piece.weights)

    def pause(self, rows: Sequence[tuple[int, int]]) -> None:
        """Free the slots of these rows, each (ticket, index), until they are admitted again. No block may be under way."""
        assert self._flight is None, "a row cannot leave in the middle of a block"
        keys = set(rows)
        for row in [row for row in self._aside if (row.request_id, row.index) in keys]:
            self._aside.remove(row)
            self._bank.keep(row.weights)
            self._paused[row.request_id, row.index] = row, self._pages[0]  # it has no pages
        for slot, row in enumerate(self._rows):
            if row is not None and (row.request_id, row.index) in keys:
                self._leave(slot)
        self._pause_count += len(rows)

    def _leave(self, slot: int) -> None:
        """The row of `slot` keeps its pages and goes."""
        row = self._rows[slot]
        assert row is not None
        self._bank.keep(row.weights)
        self._paused[row.request_id, row.index] = row, self._group(slot)
        self._rows[slot] = None

    def _sit_again(self, admit: PrefillRequest, beside: Sequence[PrefillChunk]) -> int | None:
        """A paused row that has its pages takes a slot of the same device: which. None where there is no such row or slot."""
        row, pages = self._paused.get((admit.request_id, admit.first), (None, None))
        if row is None or pages is None or not row.pages:
            return None
        free = self._free_slots(beside)[pages]
        if not free:
            return None
        row.adapter_slot = self._bank.pin(row.weights)
        self._bank.leave(row.weights)
        del self._paused[admit.request_id, admit.first]
        self._rows[free[0]] = row
        return free[0]

    def _reclaim(self, pages: PrefixCache | None = None) -> bool:
        """Take the pages of the row that was paused last, on any device or on this; False when no paused row has pages."""
        for row, own in reversed(self._paused.values()):
            if row.pages and (pages is None or pages is own):
                self._give_up(row, own)
                return True
        return False

    def _give_up(self, row: SequenceState, pages: PrefixCache) -> None:
        """The pages of a row; what it computed stays for others to begin from."""
        pages.remember(self._bank.key(row.weights), row.cached_tokens, row.pages)
        pages.give_back(row.pages)
        row.pages = []

    def _forget_flight_of_nobody(self) -> None:
        """Rows may all go while a block of theirs is under way: how it ends concerns nobody who comes after them."""
        if self._flight is None or self.rows_decoding:
            return
        self._flight = None
        try:
            jax.block_until_ready(self._cache)
        except Exception as error:
            logger.warning(
                "a decode block that nobody waited for has failed; the cache is empty again: %s", error
            )
            self._clear_all()
            if jax.process_count() > 1:  # nobody could say whether it failed for all
                raise

    def _next_piece(self, admit: PrefillRequest, beside: Sequence[PrefillChunk]) -> PrefillingRequest | None:
        """None where it does not go with those `beside` it. Its weights are pinned."""
        op = admit.op
        if (paused := self._paused.get((admit.request_id, admit.first))) is not None:
            return self._next_piece_again(admit, paused[0], beside)
        max_tokens = (
            self._max_context_length - len(op.prompt)
            if op.settings.max_tokens is None
            else op.settings.max_tokens
        )
        stop_tokens = stop_tokens_of(op.settings, self._config)
        if op.settings.stop_strings and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_dir)
        wants_logprobs = op.prompt_logprobs and admit.first == 0
        begun = self._begun.get(admit.request_id)
        # what is in the cache has no logprobs any more
        limit = len(op.prompt) - 1 if not wants_logprobs else begun.done if begun else 0
        seed = (
            self._hosts.agreed(lambda: secrets.randbits(64)) if op.settings.seed is None else op.settings.seed
        )
        adapter_slot = self._bank.pin(op.weights)
        rows = [
            SequenceState(
                request_id=admit.request_id,
                index=index,
                tenant=admit.tenant,
                weights=op.weights,
                adapter_slot=adapter_slot,
                settings=op.settings,
                seed=seed,
                stop_tokens=stop_tokens,
                prompt=op.prompt,
                max_tokens=max_tokens,
                topk=op.topk_sample_logprobs,
            )
            for index in range(admit.first, admit.first + admit.count)
        ]
        piece = None
        try:
            piece = self._place(op.prompt, rows, limit=limit, wants_logprobs=wants_logprobs, beside=beside)
            topk, targets = (
                self._score_prompt(op, adapter_slot)
                if piece is not None and piece.rows and admit.first == 0
                else (None, None)
            )
        except Exception:
            if piece is not None:
                self._give_back(piece)
            self._bank.unpin(op.weights)
            raise
        if piece is None:
            self._bank.unpin(op.weights)
            return None
        return PrefillingRequest(admit=admit, piece=piece, topk=topk, targets=targets)

    def _next_piece_again(
        self, admit: PrefillRequest, row: SequenceState, beside: Sequence[PrefillChunk]
    ) -> PrefillingRequest | None:
        """As `_next_piece`, of a paused row: of all its text."""
        text = row.text
        if row.pages:  # its device has no free slot
            self._give_up(*self._paused[admit.request_id, admit.first])
        row.adapter_slot = self._bank.pin(row.weights)
        piece = None
        try:
            piece = self._place(
                text,
                [row],
                limit=len(text) - 1,
                wants_logprobs=False,
                beside=beside,
                may_grow=self.rows_decoding > 0,
            )
        finally:
            if piece is None:
                self._bank.unpin(row.weights)
        return piece and PrefillingRequest(admit=admit, piece=piece)

    def _settle(self, one: PrefillingRequest, outputs: PrefillOutputs) -> PrefillResult | None:
        """The piece of a request has been computed: its rows begin, or it asks again."""
        piece, op, request_id = one.piece, one.admit.op, one.admit.request_id
        if (request_id, one.admit.first) in self._paused:
            if not piece.rows:
                self._give_back(piece)
                return None
            row, _ = self._paused.pop((request_id, one.admit.first))
            self._bank.pin(row.weights)
            self._bank.leave(row.weights)
            return replace(_nothing_new(one.admit), finished=self._join(piece, outputs))
        if request_id not in self._begun:
            self._begun[request_id] = PendingPrefill(
                hit_tokens=piece.cached, logprobs=np.full(len(op.prompt) + 1, np.nan, np.float32)
            )
        begun = self._begun[request_id]
        if piece.wants_logprobs:
            begun.logprobs[piece.cached + 1 : piece.length + 1] = outputs.logprobs
            begun.done = piece.length
        if not piece.rows:
            self._give_back(piece)
            return None
        del self._begun[request_id]
        for row in piece.rows:
            self._bank.pin(row.weights)
        return PrefillResult(
            prompt_logprobs=_prompt_logprobs(op, begun.logprobs) if piece.wants_logprobs else None,
            prompt_cache_hit_tokens=begun.hit_tokens,
            finished=self._join(piece, outputs),
            topk_prompt_logprobs=one.topk,
            target_prompt_logprobs=one.targets,
        )

    def decode(self) -> bool:
        """Up to `block` more tokens for every row that has the pages for them. Whether rows have ended; those that a stop string ends are
        known to `collect` alone."""
        try:
            if isinstance(self._flight, Exception):
                raise self._flight
            for row in self._aside:
                row.blocks_aside += 1
            if self._flight is None:
                self._resumed = self._resume() if self._aside else None
                self._make_room()
                live = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
                if not live:
                    return False
                self._flight = self._begin(self._blocks.block(live), self._blocks.nothing_before)
                self._expect(self._flight.block)
            self._flight.next = self._block_after(self._flight.block)
            self._flight.sampled = to_host(self._flight.outputs)
        except Exception:
            self._clear_all()
            raise
        return not all(self._flight.sampled.carry.going[slot] for slot, _ in self._flight.block.live)

    def collect(self, *, go_on: bool) -> Sequence[FinishedRow | FailedRow]:
        """The rows that are over after `decode`. To `go_on` the next block begins first, where that is possible."""
        flight, self._flight = self._flight, None
        finished, self._resumed = [self._resumed], None
        if isinstance(flight, InFlightBatch):
            assert flight.sampled is not None, "decode comes first"
            going = flight.sampled.carry.going
            if self._aside and not all(going[slot] for slot, _ in flight.block.live):
                go_on = False  # rows that were set aside wait for the pages of those that ended
            if (
                go_on
                and flight.next is not None
                and any(going[slot] or not row.coming for slot, row in flight.next.live)
            ):
                try:
                    self._flight = self._begin(flight.next, flight.outputs.carry)
                    self._ahead_count += 1
                except Exception as error:  # what this block brought is not lost with it
                    self._flight = error
            for slot, row in flight.block.live:
                row.coming = 0
                if self._rows[slot] is row:  # else it has been released
                    tokens, logprobs = flight.sampled.tokens[slot], flight.sampled.logprobs[slot]
                    finished.append(
                        self._extend(slot, tokens[tokens >= 0].tolist(), logprobs[tokens >= 0].tolist())
                    )
            if isinstance(self._flight, InFlightBatch):
                self._expect(self._flight.block)
        return [row for row in finished if row is not None]

    def running(self, request_id: int) -> Sequence[RunningRow]:
        paused = (row for row, _ in self._paused.values())
        rows = [
            row
            for row in (*self._rows, *self._aside, *paused)
            if row is not None and row.request_id == request_id
        ]
        return [RunningRow(index=row.index, tokens=row.tokens, logprobs=row.logprobs) for row in rows]

    def release(self, request_id: int) -> None:
        """Free the slots of a request."""
        self._begun.pop(request_id, None)
        for slot, row in enumerate(self._rows):
            if row is not None and row.request_id == request_id:
                self._clear(slot)
        for row in [row for row in self._aside if row.request_id == request_id]:
            self._aside.remove(row)
            self._bank.unpin(row.weights)
        for key in [key for key in self._paused if key[0] == request_id]:
            row, pages = self._paused.pop(key)
            pages.give_back(row.pages)
            self._bank.leave(row.weights)

    @property
    def unfinished_tokens(self) -> int:
        """How many tokens of prompts that are computed in part may wait in the cache for their next pieces: a quarter of what it holds."""
        return (self._size.pages - 1) * PAGE // 4

    # --- pages --------------------------------------------------------------------------------------------------------

    def _group(self, slot: int) -> PrefixCache:
        """The pages on the device where a slot lies."""
        return self._pages[slot * self._groups // self.num_slots]

    def _place(
        self,
        tokens: np.ndarray,
        rows: Sequence[SequenceState],
        *,
        limit: int,
        wants_logprobs: bool,
        beside: Sequence[PrefillChunk] = (),
        may_grow: bool = False,
    ) -> PrefillChunk | None:
        """Pages for the next piece of `tokens`, of which at most `limit` may come from the cache, and for the rows that begin after the
        last piece; where they `may_grow`, one more must be free for each and for whoever else has the same device. CapacityError, and
        nothing is taken, where they are not. None where the turn is full with the pieces `beside` it, or where less would have to be
        computed after them."""
        weights, adapter_slot = rows[0].weights, rows[0].adapter_slot
        free = self._free_slots(beside)
        found, home = self._find(weights, tokens, limit=limit, free=free)
        alike = (piece for piece in beside if piece.weights == weights)
        shared = max(
            (common_length(piece.tokens[: piece.length], tokens[:limit]) for piece in alike), default=0
        )
        room = self._layout.shapes.turn - sum(len(piece.blocks) for piece in beside)
        if not room or blocks_of(len(tokens) - shared) < blocks_of(len(tokens) - found.length):
            return None
        length = min(found.length + room * BLOCK, len(tokens))
        rows = rows if length == len(tokens) else ()
        nearest = sorted(free, key=lambda pages: (pages is not home, -len(free[pages])))
        slots = list(chain.from_iterable(free[pages] for pages in nearest))[: len(rows) or 1]
        spare = {pages: self._size.slots - len(free[pages]) + 1 for pages in free} if may_grow else {}
        places = [self._group(slot) for slot in slots]
        while True:
            try:
                tables = take_tables(
                    places, length, found=found, home=home, spare=spare, text_length=len(tokens)
                )
                break
            except CapacityError:
                if not self._reclaim():
                    raise
        return PrefillChunk(
            tokens=tokens,
            cached=found.length,
            length=length,
            weights=weights,
            adapter_slot=adapter_slot,
            wants_logprobs=wants_logprobs,
            slots=slots,
            tables=tables.of_rows,
            before=tables.before,
            after=tables.after,
            rows=rows,
        )

    def _find(
        self,
        weights: str | None,
        tokens: np.ndarray,
        *,
        limit: int,
        free: Mapping[PrefixCache, Sequence[int]],
    ) -> tuple[Prefix, PrefixCache]:
        """What one device remembers of the first `limit` tokens, and its pages: of the device where the fewest blocks are left to compute,
        and among those alike the fewest rows sit. Nothing, where no block is spared."""
        key = self._bank.key(weights)
        found = {pages: pages.find(key, tokens[:limit]) for pages in self._pages}
        left = {pages: blocks_of(len(tokens) - prefix.length) for pages, prefix in found.items()}
        home = min(self._pages, key=lambda pages: (left[pages], -len(free[pages])))
        return found[home] if left[home] < blocks_of(len(tokens)) else Prefix(), home

    def _free_slots(self, beside: Sequence[PrefillChunk]) -> dict[PrefixCache, list[int]]:
        """By device, those that nobody sits in, nor will when the pieces `beside` are computed."""
        reserved = {slot for piece in beside for slot in piece.slots if piece.rows}
        free: dict[PrefixCache, list[int]] = {pages: [] for pages in self._pages}
        for slot, row in enumerate(self._rows):
            if row is None and slot not in reserved:
                free[self._group(slot)].append(slot)
        return free

    def _give_back(self, piece: PrefillChunk) -> None:
        for slot, pages in zip(piece.slots, piece.tables, strict=True):
            self._group(slot).give_back(pages)

    def _make_room(self) -> None:
        """Pages for the next block of every row, those that came first before others. When there are none, the row that came last of the
        tenant with the most pages is set aside."""
        for slot, row in sorted(
            ((slot, row) for slot, row in enumerate(self._rows) if row is not None),
            key=lambda each: _age(each[1]),
        ):
            while self._rows[slot] is row and not self._has_room(slot, row):
                group = self._group(slot)
                beside = [
                    (at, other)
                    for at, other in enumerate(self._rows)
                    if other is not None and self._group(at) is group
                ]
                pages = Counter[str]()
                for _, other in beside:
                    pages[other.tenant] += len(other.pages)
                self._set_aside(max(beside, key=lambda each: (pages[each[1].tenant], *_age(each[1])))[0])

    def _has_room(self, slot: int, row: SequenceState) -> bool:
        """The row has pages for its next block, now at the latest."""
        wanted = -(-(row.position + min(self._block, row.remaining)) // PAGE) - len(row.pages)
        if wanted <= 0:
            return True
        group = self._group(slot)
        while (new := group.take(wanted)) is None and self._reclaim(group):
            pass
        row.pages += new or ()
        return new is not None

    def _set_aside(self, slot: int) -> None:
        row = self._rows[slot]
        assert row is not None
        self._vacate(slot)
        row.blocks_aside = 0
        self._aside = sorted((*self._aside, row), key=_age)
        self._set_aside_count += 1

    def _resume(self) -> FinishedRow | FailedRow | None:
        """Compute the next piece of the row that has waited longest, if there is room for it and the others."""
        row = self._aside[0]
        text = row.text
        try:
            piece = self._place(text, [row], limit=len(text) - 1, wants_logprobs=False, may_grow=True)
        except CapacityError:
            return None
        assert piece is not None, "nothing is beside it"
        (outputs,) = self._prefill([piece])
        if not piece.rows:
            self._give_back(piece)
            return None
        del self._aside[0]
        return next(iter(self._join(piece, outputs)), None)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _prefill(self, pieces: Sequence[PrefillChunk]) -> list[PrefillOutputs]:
        """The pieces into their pages, which are remembered, and the first tokens of the rows that begin. Pages go back on any error."""
        outputs: list[PassOutputs] = []
        try:
            for run, settings in self._layout.passes(pieces):
                self._cache, output = prefill(
                    self._cache,
                    self._params,
                    self._bank.arrays,
                    run,
                    settings,
                    config=self._config,
                    tempered=self._tempered,
                )
                outputs.append(output)
            outputs = to_host(outputs)
        except Exception as error:
            for piece in pieces:
                self._give_back(piece)
            self._recover(error)
            raise
        for piece in pieces:
            for group, pages in {
                self._group(slot): pages for slot, pages in zip(piece.slots, piece.tables, strict=True)
            }.items():
                group.remember(self._bank.key(piece.weights), piece.tokens[: piece.length], pages)
        return self._layout.outputs(pieces, outputs)

    def _score_prompt(self, op: Sample, adapter_slot: int) -> tuple[TopkLogprobs | None, CsrMatrix | None]:
        """The likeliest tokens and the chosen ones at every prompt position, where they are asked for."""
        if not op.topk_prompt_logprobs and op.target_prompt_tokens is None:
            return None, None
        topk, targets = self._scorer.run(
            self._bank.arrays,
            adapter_slot,
            op.prompt,
            top=op.topk_prompt_logprobs,
            targets=op.target_prompt_tokens,
        )
        if not op.topk_prompt_logprobs:
            return None, targets
        topk = at_prompt_positions(topk)
        unasked = 0 if op.prompt_logprobs_last_n is None else len(op.prompt) - op.prompt_logprobs_last_n
        topk.token_ids[:unasked], topk.logprobs[:unasked] = 0, NO_LOGPROB
        return topk, targets

    def programs(self) -> Iterator[tuple[str, Lowered]]:
        """Every sampling program, one after the other, as it is before XLA has compiled it: the likeliest first."""
        config, tempered = self._config, self._tempered
        nobody, passes, longest = self._blocks.block([]), self._layout.examples(), self._blocks.ends
        ends = [None] if longest is None else [longest[:count] for count in range(1, len(longest) + 1)]
        of_adapters = adapter_count_buckets(self._layout.bank, rows=self.num_slots)
        for most in sorted(
            {run.adapters.most for run, _ in passes} | {*of_adapters}, key=lambda most: most or 0
        ):
            for run, of_rows in passes:
                if run.adapters.most == most:
                    given = (self._cache, self._params, self._bank.arrays, run, of_rows)
                    yield (
                        f"prefill, {len(run.tokens)} blocks",
                        prefill.lower(*given, config=config, tempered=tempered),
                    )
            for each in ends if most in of_adapters else ():
                rows = replace(nobody.rows, adapters=replace(nobody.rows.adapters, most=most))
                given = (self._cache, self._params_apart, self._bank.arrays, rows, nobody.settings)
                yield (
                    "decode_block",
                    decode_block.lower(
                        *given, config=config, steps=self._block, ends=each, tempered=tempered
                    ),
                )

    def _block_after(self, block: Block) -> Block | None:
        """What may follow a block that is under way: None where that needs pages that are not free, or another program, whose compilation
        nobody should wait for."""
        live = [(slot, row) for slot, row in enumerate(self._rows) if row is not None and row.remaining > 0]
        if not live or not all(
            self._has_room(slot, row) for slot, row in sorted(live, key=lambda each: _age(each[1]))
        ):
            return None
        after = self._blocks.block(live)
        return after if after.same_program(block) else None

    def _begin(self, block: Block, carry: Carry) -> InFlightBatch:
        self._cache, outputs = decode_block(
            self._cache,
            self._params_apart,
            self._bank.arrays,
            replace(block.rows, before=carry),
            block.settings,
            config=self._config,
            steps=self._block,
            ends=block.ends,
            tempered=self._tempered,
        )
        return InFlightBatch(block=block, outputs=outputs)

    def _expect(self, block: Block) -> None:
        for _, row in block.live:
            row.coming = self._block

    def _extend(
        self, slot: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> FinishedRow | FailedRow | None:
        """Append what was sampled; when that completes the row or goes wrong, free its slot and return what became of it."""
        row = self._rows[slot]
        assert row is not None and tokens
        try:
            complete = row.extend(tokens, logprobs, self._tokenizer)
            if complete is None:
                return None
            length, reason = complete
            topk = self._topk(row, length) if row.topk else None
        except Exception as error:
            self._clear(slot)
            return FailedRow(request_id=row.request_id, error=error)
        self._vacate(slot)
        self._bank.unpin(row.weights)
        sequence = SampledSequence(
            tokens=np.array(row.tokens[:length], np.int32),
            logprobs=np.array(row.logprobs[:length], np.float32),
            stop_reason=reason,
            topk=topk,
        )
        return FinishedRow(request_id=row.request_id, index=row.index, sequence=sequence)

    def _topk(self, row: SequenceState, length: int) -> TopkLogprobs:
        """The likeliest tokens at each of a complete row's first `length` positions, by a pass over its whole text."""
        text = row.text[: len(row.prompt) + length - 1]
        temperature = row.settings.temperature if self._tempered and row.settings.temperature > 0 else 1.0
        topk, _ = self._scorer.run(
            self._bank.arrays, row.adapter_slot, text, top=row.topk, temperature=temperature
        )
        return TopkLogprobs(token_ids=topk.token_ids[-length:], logprobs=topk.logprobs[-length:])

    # --- slots --------------------------------------------------------------------------------------------------------

    def _join(self, piece: PrefillChunk, outputs: PrefillOutputs) -> list[FinishedRow | FailedRow]:
        """The rows of a piece take their slots, with their first tokens; what becomes of those that are over with them."""
        for slot, row, pages in zip(piece.slots, piece.rows, piece.tables, strict=True):
            row.pages = list(pages)
            self._rows[slot] = row
        firsts = zip(piece.slots, outputs.first_tokens, outputs.first_logprobs, strict=True)
        over = [self._extend(slot, [token], [logprob]) for slot, token, logprob in firsts]
        return [row for row in over if row is not None]

    def _vacate(self, slot: int) -> None:
        """The row of `slot` leaves; what it computed stays for others to begin from."""
        row = self._rows[slot]
        assert row is not None
        self._give_up(row, self._group(slot))
        self._rows[slot] = None

    def _clear(self, slot: int) -> None:
        """The row of `slot` has failed, and nobody knows what it left behind."""
        row = self._rows[slot]
        assert row is not None
        self._group(slot).give_back(row.pages)
        self._rows[slot] = None
        self._bank.unpin(row.weights)

    def _clear_all(self) -> None:
        for row in (*self._rows, *self._aside):
            if row is not None:
                self._bank.unpin(row.weights)
        for row, _ in self._paused.values():
            self._bank.leave(row.weights)
        for leaf in jax.tree.leaves(self._cache):
            leaf.delete()  # or the next would lie beside it, for which there may be no room
        self._forget_everything()

    def _forget_everything(self) -> None:
        self._rows[:] = [None] * self.num_slots
        self._aside, self._paused, self._flight, self._resumed = [], {}, None, None
        each = self._size.pages
        self._pages = [PrefixCache(first=group * each, count=each) for group in range(self._groups)]
        self._cache: KVCache = empty_cache(config=self._config, pages=each * self._groups, dtype=self._dtype)

    def _recover(self, error: Exception) -> None:
        """After a failed prefill: nothing is wrong with the other rows, unless the program took the donated cache with it: at once, or on a
        GPU, where it finds no room for temporaries, by returning one that never comes to be."""
        try:
            jax.block_until_ready(self._cache)
        except Exception:
            self._clear_all()
            raise RowsLostError(
                f"a failed prefill took the key-value cache of all running samples with it: {error}"
            ) from error


def _nothing_new(admit: PrefillRequest) -> PrefillResult:
    """A paused row goes on: its prompt was computed long ago."""
    return PrefillResult(prompt_logprobs=None, prompt_cache_hit_tokens=len(admit.op.prompt), finished=())


def _age(row: SequenceState) -> tuple[int, int]:
    return row.request_id, row.index


def _prompt_logprobs(op: Sample, known: np.ndarray) -> np.ndarray:
    """By position of the prompt, NaN where there is none or none is asked for."""
    logprobs = known[: len(op.prompt)].copy()
    logprobs[: max(1, len(op.prompt) - (op.prompt_logprobs_last_n or len(op.prompt)))] = np.nan
    return logprobs
