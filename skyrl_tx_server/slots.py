"""The decode slots: which row sits where, and the conversation with the sampling programs, once per block.

The only device state is the key-value cache. Everything else about a row lives here and travels with each dispatch, so that a failed
program costs the rows their cache and nothing more.

A slot keeps its keys and values after its row has left, until another row needs the place. A prompt that begins like the tokens of any
slot under the same weights is prefilled from there on only: the next turn of a conversation, the other members of a group, a system prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from skyrl_tx_server.batching import PREFILL_PIECE, bucket, pad_tokens, prefill_cost, prefill_lengths, prefix_ends, segment_ends
from skyrl_tx_server.engine import Admission, FailedRow, FinishedRow, RowsLostError, RunningRow
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.hosts import ALONE, Hosts
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.kv_cache import KVCache, empty_cache
from skyrl_tx_server.model.low_rank import users_of
from skyrl_tx_server.model.mesh import to_host
from skyrl_tx_server.model.transformer import Params
from skyrl_tx_server.ops import NO_LOGPROB, Cells, Sample, SampledSequence, SamplingSettings, StopReason, TopkLogprobs
from skyrl_tx_server.snapshots import SnapshotBank, SnapshotKey
from skyrl_tx_server.steps.sample import MAX_STOP_TOKENS, Prompt, PromptOutputs, Rows, RowSettings, decode_block, prefill
from skyrl_tx_server.steps.score import Scorer, at_prompt_positions
from skyrl_tx_server.stop_strings import find_stop, load_tokenizer


@dataclass(kw_only=True, slots=True)
class _Row:
    """One running sample."""

    ticket: int
    index: int  # which sample of its request
    weights: str | None
    adapter_slot: int
    settings: SamplingSettings
    seed: int
    stop_tokens: tuple[int, ...]
    prompt: np.ndarray  # [P] int32
    max_tokens: int
    topk: int  # likeliest tokens to report at each of its tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def text(self) -> np.ndarray:
        """[P + n] int32"""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def cached_tokens(self) -> np.ndarray:
        """All but the last, which the next step computes."""
        return self.text[:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """What a slot's keys and values were computed from."""

    snapshot: SnapshotKey
    tokens: np.ndarray  # [n] int32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prefix:
    """The first `length` tokens of a prompt, found in `slot`."""

    slot: int
    length: int


class DecodeSlots:
    """Rows join by `admit`, all of them advance by `decode`, and each leaves when it is complete."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        bank: SnapshotBank,
        *,
        num_slots: int,
        max_context_length: int,
        block: int,
        dtype: np.dtype,
        model_dir: Path,
        tempered_logprobs: bool,
        hosts: Hosts = ALONE,
    ) -> None:
        self._config = config
        self._params = params
        self._bank = bank
        self._max_context_length = max_context_length
        self._dtype = np.dtype(dtype)
        self._model_dir = model_dir
        self._tempered = tempered_logprobs
        self._hosts = hosts
        self._prefill_lengths = prefill_lengths(max_context_length)
        self._segment_ends = segment_ends(max_context_length)
        self._prefix_ends = prefix_ends(max_context_length)
        self._block = min(block, self._segment_ends[0])
        self._rows: list[_Row | None] = [None] * num_slots
        self._parked: dict[int, _Contents] = {}  # what rows that left have left in their slots, longest ago first
        self._begun: dict[int, int] = {}  # ticket -> tokens of its prompt that lay in the cache when its prefill began
        self._tokenizer: Tokenizer | None = None
        self._scorer = Scorer(config=config, params=params, lengths=self._prefill_lengths)
        self._cache: KVCache = self._empty_cache()

    @property
    def num_slots(self) -> int:
        return len(self._rows)

    @property
    def rows_decoding(self) -> int:
        return sum(row is not None for row in self._rows)

    def admit(self, ticket: int, op: Sample, *, first: int, count: int) -> Admission | None:
        """Prefill `op`'s prompt into `count` free slots and sample the first token of each; None after a piece of a long prompt."""
        max_tokens = self._checked_max_tokens(op)
        stop_tokens = self._stop_tokens(op.settings)
        if op.settings.stop_strings and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_dir)
        # prompt logprobs need every position's hidden state, so nothing can be taken from the cache
        prefix = None if op.prompt_logprobs else self._longest_prefix(self._bank.key(op.weights), op.prompt)
        cached = prefix.length if prefix else 0
        hit_tokens = self._begun.setdefault(ticket, cached)
        if not op.prompt_logprobs and len(op.prompt) - cached > PREFILL_PIECE:
            self._park(op, cached + PREFILL_PIECE, prefix)
            return None
        seed = self._hosts.agreed(lambda: secrets.randbits(64)) if op.settings.seed is None else op.settings.seed
        adapter_slots = [self._bank.pin(op.weights) for _ in range(count)]
        rows = [
            _Row(
                ticket=ticket,
                index=index,
                weights=op.weights,
                adapter_slot=adapter_slot,
                settings=op.settings,
                seed=seed,
                stop_tokens=stop_tokens,
                prompt=op.prompt,
                max_tokens=max_tokens,
                topk=op.topk_sample_logprobs,
            )
            for index, adapter_slot in zip(range(first, first + count), adapter_slots, strict=True)
        ]
        slots = self._places(count, prefix)
        for slot, row in zip(slots, rows, strict=True):
            self._parked.pop(slot, None)
            self._rows[slot] = row
        try:
            topk, targets = self._score_prompt(op, adapter_slots[0]) if first == 0 else (None, None)
            outputs = self._prefill(op, len(op.prompt), slots, prefix, rows=rows, adapter_slot=adapter_slots[0])
        except Exception as error:
            for slot in slots:
                self._clear(slot)
            self._recover(error)
            raise
        del self._begun[ticket]
        finished = [
            self._extend(slot, [int(token)], [float(logprob)])
            for slot, token, logprob in zip(
                slots, outputs.first_tokens, outputs.first_logprobs, strict=False
            )  # one entry per slot there is
        ]
        return Admission(
            prompt_logprobs=_prompt_logprobs(op, np.asarray(outputs.logprobs)) if op.prompt_logprobs else None,
            prompt_cache_hit_tokens=hit_tokens,
            finished=[row for row in finished if row is not None],
            topk_prompt_logprobs=topk,
            target_prompt_logprobs=targets,
        )

    def decode(self) -> Sequence[FinishedRow | FailedRow]:
        """Up to `block` more tokens for every row."""
        live = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
        try:
            tokens, logprobs = self._decode(live)
            finished = [
                self._extend(slot, tokens[slot][tokens[slot] >= 0].tolist(), logprobs[slot][tokens[slot] >= 0].tolist()) for slot, _ in live
            ]
        except Exception:
            self._clear_all()
            raise
        return [row for row in finished if row is not None]

    def running(self, ticket: int) -> Sequence[RunningRow]:
        rows = [row for row in self._rows if row is not None and row.ticket == ticket]
        return [RunningRow(index=row.index, tokens=row.tokens, logprobs=row.logprobs) for row in rows]

    def release(self, ticket: int) -> None:
        """Free the slots of a request."""
        self._begun.pop(ticket, None)
        for slot, row in enumerate(self._rows):
            if row is not None and row.ticket == ticket:
                self._clear(slot)

    def _longest_prefix(self, snapshot: SnapshotKey, prompt: np.ndarray) -> _Prefix | None:
        """Where most of `prompt` lies in the cache already; None where using it would not shorten the prefill."""
        contents = {slot: content.tokens for slot, content in self._parked.items() if content.snapshot == snapshot}
        running = {slot: row for slot, row in enumerate(self._rows) if row is not None and self._bank.key(row.weights) == snapshot}
        contents |= {slot: row.cached_tokens for slot, row in running.items()}
        found = [
            _Prefix(slot=slot, length=min(_common_length(tokens, prompt), len(prompt) - 1))  # the last token is always computed
            for slot, tokens in contents.items()
        ]
        longest = max(found, key=lambda prefix: prefix.length, default=None)
        if longest is None or prefill_cost(len(prompt) - longest.length) == prefill_cost(len(prompt)):
            return None
        return longest

    def _places(self, count: int, prefix: _Prefix | None) -> list[int]:
        """Free slots, those first whose contents will be missed least: the parked one that the prompt continues, empty ones, the oldest."""
        parked = list(self._parked)
        continued = (
            [prefix.slot] if prefix and prefix.slot in self._parked and prefix.length == len(self._parked[prefix.slot].tokens) else []
        )
        empty = [slot for slot, row in enumerate(self._rows) if row is None and slot not in self._parked]
        return list(dict.fromkeys([*continued, *empty, *parked]))[:count]

    def _park(self, op: Sample, length: int, prefix: _Prefix | None) -> None:
        """Compute the first `length` tokens of a prompt and leave them in a free slot, where the next piece finds them."""
        (slot,) = self._places(1, prefix)
        self._parked.pop(slot, None)
        adapter_slot = self._bank.pin(op.weights)
        try:
            self._prefill(op, length, [slot], prefix, rows=[], adapter_slot=adapter_slot)
        except Exception as error:
            self._recover(error)
            raise
        finally:
            self._bank.unpin(op.weights)
        self._parked[slot] = _Contents(snapshot=self._bank.key(op.weights), tokens=op.prompt[:length])

    def _prefill(
        self, op: Sample, length: int, slots: Sequence[int], prefix: _Prefix | None, *, rows: Sequence[_Row], adapter_slot: int
    ) -> PromptOutputs:
        """The first `length` tokens of a prompt into `slots`."""
        cached = prefix.length if prefix else 0
        prompt = Prompt(
            tokens=pad_tokens(op.prompt[cached:length], self._prefill_lengths),
            length=np.array(length - cached, np.int32),
            cached=np.array(cached, np.int32),
            source=np.array(prefix.slot if prefix else 0, np.int32),
            adapter_index=np.array(adapter_slot, np.int32),
            slots=np.array([*slots, *[0] * (self.num_slots - len(slots))], np.int32),
            num_slots=np.array(len(slots), np.int32),
            want_logprobs=np.array(op.prompt_logprobs),
        )
        settings = self._row_settings([*rows, *[None] * (self.num_slots - len(rows))])
        segments = self._segments(bucket(cached, self._prefix_ends)) if cached else 0
        self._cache, outputs = prefill(
            self._cache, self._params, self._bank.arrays, prompt, settings, config=self._config, segments=segments, tempered=self._tempered
        )
        return to_host(outputs)

    def _score_prompt(self, op: Sample, adapter_slot: int) -> tuple[TopkLogprobs | None, Cells | None]:
        """The likeliest tokens and the chosen ones at every prompt position, where they are asked for."""
        if not op.topk_prompt_logprobs and op.target_prompt_tokens is None:
            return None, None
        topk, targets = self._scorer.run(
            self._bank.arrays, adapter_slot, op.prompt, top=op.topk_prompt_logprobs, targets=op.target_prompt_tokens
        )
        if not op.topk_prompt_logprobs:
            return None, targets
        topk = at_prompt_positions(topk)
        unasked = 0 if op.prompt_logprobs_last_n is None else len(op.prompt) - op.prompt_logprobs_last_n
        topk.token_ids[:unasked], topk.logprobs[:unasked] = 0, NO_LOGPROB
        return topk, targets

    def _decode(self, live: Sequence[tuple[int, _Row]]) -> tuple[np.ndarray, np.ndarray]:
        rows = Rows(
            tokens=np.zeros(self.num_slots, np.int32),
            positions=np.full(self.num_slots, self._max_context_length, np.int32),  # a free slot writes beyond the cache: nowhere
            remaining=np.zeros(self.num_slots, np.int32),
            adapters=users_of(np.array([row.adapter_slot if row else live[0][1].adapter_slot for row in self._rows], np.int32)),
            stop_tokens=np.full((self.num_slots, MAX_STOP_TOKENS), -1, np.int32),
        )
        for slot, row in live:
            rows.tokens[slot] = row.tokens[-1]
            rows.positions[slot] = len(row.prompt) + len(row.tokens) - 1
            rows.remaining[slot] = row.max_tokens - len(row.tokens)
            rows.stop_tokens[slot, : len(row.stop_tokens)] = row.stop_tokens
        self._cache, outputs = decode_block(
            self._cache,
            self._params,
            self._bank.arrays,
            rows,
            self._row_settings(self._rows),
            config=self._config,
            steps=self._block,
            segments=self._segments(max(int(rows.positions[slot]) for slot, _ in live)),
            tempered=self._tempered,
        )
        host = to_host(outputs)
        return host.tokens, host.logprobs

    def _segments(self, length: int) -> int:
        """How many segments of the cache hold its first `length` positions."""
        return 1 + self._segment_ends.index(bucket(length, self._segment_ends))

    def _row_settings(self, rows: Sequence[_Row | None]) -> RowSettings:
        """Free slots are greedy and unfiltered, which costs nothing."""
        vocabulary = self._config.vocab_size
        settings = RowSettings(
            seeds=np.zeros((len(rows), 2), np.uint32),
            sample_indices=np.zeros(len(rows), np.int32),
            temperatures=np.zeros(len(rows), np.float32),
            top_k=np.full(len(rows), vocabulary, np.int32),
            top_p=np.ones(len(rows), np.float32),
        )
        for at, row in enumerate(rows):
            if row is not None:
                seed = row.seed & (1 << 64) - 1
                settings.seeds[at] = seed >> 32, seed & 0xFFFFFFFF
                settings.sample_indices[at] = row.index
                settings.temperatures[at] = row.settings.temperature
                settings.top_k[at] = min(row.settings.top_k, vocabulary) if row.settings.top_k > 0 else vocabulary
                settings.top_p[at] = row.settings.top_p
        return settings

    def _extend(self, slot: int, tokens: Sequence[int], logprobs: Sequence[float]) -> FinishedRow | FailedRow | None:
        """Append what was sampled; when that completes the row or goes wrong, free its slot and return what became of it."""
        row = self._rows[slot]
        assert row is not None and tokens
        try:
            return self._extended(slot, row, tokens, logprobs)
        except Exception as error:
            self._clear(slot)
            return FailedRow(ticket=row.ticket, error=error)

    def _extended(self, slot: int, row: _Row, tokens: Sequence[int], logprobs: Sequence[float]) -> FinishedRow | None:
        if np.isnan(logprobs).any():
            raise UserError(
                f"sampling from {row.weights or 'the base model'}: its probabilities are not numbers, so its weights have diverged; "
                "go back to an earlier checkpoint and lower the learning rate"
            )
        row.tokens += tokens
        row.logprobs += logprobs
        length = len(row.tokens)
        reason = StopReason.STOP if row.tokens[-1] in row.stop_tokens else StopReason.LENGTH if length >= row.max_tokens else None
        if row.settings.stop_strings:
            assert self._tokenizer is not None
            cut = find_stop(self._tokenizer, row.tokens, row.settings.stop_strings, new=len(tokens))
            if cut is not None:
                length, reason = cut, StopReason.STOP
        if reason is None:
            return None
        topk = self._topk(row, length) if row.topk else None
        self._free(slot)
        sequence = SampledSequence(
            tokens=np.array(row.tokens[:length], np.int32),
            logprobs=np.array(row.logprobs[:length], np.float32),
            stop_reason=reason,
            topk=topk,
        )
        return FinishedRow(ticket=row.ticket, index=row.index, sequence=sequence)

    def _topk(self, row: _Row, length: int) -> TopkLogprobs:
        """The likeliest tokens at each of a complete row's first `length` positions, by a pass over its whole text."""
        text = row.text[: len(row.prompt) + length - 1]
        temperature = row.settings.temperature if self._tempered and row.settings.temperature > 0 else 1.0
        topk, _ = self._scorer.run(self._bank.arrays, row.adapter_slot, text, top=row.topk, temperature=temperature)
        return TopkLogprobs(token_ids=topk.token_ids[-length:], logprobs=topk.logprobs[-length:])

    def _free(self, slot: int) -> None:
        """The row of `slot` is complete; what it computed stays for others to begin from."""
        row = self._rows[slot]
        assert row is not None
        self._parked[slot] = _Contents(snapshot=self._bank.key(row.weights), tokens=row.cached_tokens)
        self._rows[slot] = None
        self._bank.unpin(row.weights)

    def _clear(self, slot: int) -> None:
        """The row of `slot` has failed, and nobody knows what it left behind."""
        row = self._rows[slot]
        assert row is not None
        self._rows[slot] = None
        self._bank.unpin(row.weights)

    def _clear_all(self) -> None:
        for slot, row in enumerate(self._rows):
            if row is not None:
                self._clear(slot)
        self._parked.clear()
        self._cache = self._empty_cache()

    def _recover(self, error: Exception) -> None:
        """After a failed prefill: nothing is wrong with the other rows, unless the program took the donated cache with it."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._cache)):
            self._clear_all()
            raise RowsLostError(f"a failed prefill took the key-value cache of all running samples with it: {error}") from error

    def _empty_cache(self) -> KVCache:
        return empty_cache(config=self._config, slots=self.num_slots, ends=self._segment_ends, dtype=self._dtype)

    def _checked_max_tokens(self, op: Sample) -> int:
        """How many tokens the request may sample. UserError for what cannot be honoured."""
        settings, length, limit = op.settings, len(op.prompt), self._max_context_length
        if length < 1:
            raise UserError("the prompt is empty: send at least one token")
        if int(op.prompt.min()) < 0 or int(op.prompt.max()) >= self._config.vocab_size:
            raise UserError(f"the prompt holds a token id outside 0..{self._config.vocab_size - 1}, the model's vocabulary")
        if op.num_samples < 1:
            raise UserError(f"num_samples={op.num_samples}; ask for at least one")
        max_tokens = limit - length if settings.max_tokens is None else settings.max_tokens
        if length + max(max_tokens, 1) > limit:
            wanted = settings.max_tokens if settings.max_tokens is not None else 1
            raise UserError(f"Prompt length plus max_tokens exceeds the model's context window: {length} + {wanted} > {limit}")
        if max_tokens < 1:
            raise UserError(f"max_tokens={max_tokens}; ask for at least one")
        if not settings.temperature >= 0:
            raise UserError(f"temperature={settings.temperature}; it must be 0 (greedy) or more")
        if not 0 < settings.top_p <= 1:
            raise UserError(f"top_p={settings.top_p}; it must be above 0 and at most 1")
        if settings.top_k == 0 or settings.top_k < -1:
            raise UserError(f"top_k={settings.top_k}; it must be -1 (off) or at least 1")
        return max_tokens

    def _stop_tokens(self, settings: SamplingSettings) -> tuple[int, ...]:
        tokens = {*settings.stop_token_ids, *(self._config.eos_token_ids if settings.stop_at_eos else ())}
        if len(tokens) > MAX_STOP_TOKENS:
            raise UserError(f"{len(tokens)} stop tokens; at most {MAX_STOP_TOKENS} are supported")
        if any(not stop for stop in settings.stop_strings):
            raise UserError("an empty stop string would stop everything; leave it out")
        return tuple(sorted(tokens))


def _prompt_logprobs(op: Sample, computed: np.ndarray) -> np.ndarray:
    """By position of the prompt, NaN where there is none or none is asked for; `computed` has them one position earlier."""
    logprobs = np.full(len(op.prompt), np.nan, np.float32)
    begin = max(1, len(op.prompt) - (op.prompt_logprobs_last_n or len(op.prompt)))
    logprobs[begin:] = computed[begin - 1 : len(op.prompt) - 1]
    return logprobs


def _common_length(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens the two share."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
