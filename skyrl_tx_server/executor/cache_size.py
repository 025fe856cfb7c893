"""Chooses the number of slots (sequences that decode at the same time) and the number of KV pages that fit
into the available memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.resolved_model import ResolvedModel
from skyrl_tx_server.model.kv_cache import page_bytes
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.model_runner import CacheSize, decodes_in_place

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 32
DEFAULT_SLOTS_ON_GPU = 256
TOKENS_PER_DEFAULT_SLOT = 2048
"""If a GPU kernel reads the KV pages in place and `cache_tokens` is not set, the default of `max_num_seqs` is
about one sequence for each TOKENS_PER_DEFAULT_SLOT tokens of the KV cache, from DEFAULT_SLOTS to
DEFAULT_SLOTS_ON_GPU."""


def requested_cache(model: ResolvedModel) -> CacheSize:
    """Return the requested KV cache size of one data-parallel rank: the rank's share of `cache_tokens`. By
    default, the cache holds the rank's share of `max_num_seqs` sequences of maximum length, with one spare
    page for each sequence."""
    settings, config = model.settings, model.config
    dp_ranks, context_pages = settings.mesh.batch, -(-model.max_context_length // PAGE_SIZE)
    default_slots = DEFAULT_SLOTS_ON_GPU if decodes_in_place(config) else DEFAULT_SLOTS
    slots = max(1, (settings.max_num_seqs or default_slots) // dp_ranks)
    pages = slots * (context_pages + 1)
    if settings.cache_tokens is not None:
        pages = -(-settings.cache_tokens // PAGE_SIZE // dp_ranks)
    return CacheSize(
        slots=slots,
        pages=1 + pages,
        page_bytes=page_bytes(config, model.dtype) // config.tensor_shards,
        context_pages=context_pages,
        copied_pages=0 if decodes_in_place(config) else context_pages,
    )


def fitting_cache(model: ResolvedModel, budget_bytes: float) -> CacheSize:
    """Return the requested size, reduced so that the cache of one data-parallel rank and the copies of its
    pages (`CacheSize.copied_pages`) fit into `budget_bytes` on each device. Raises ConfigError if one
    sequence of maximum length or `cache_tokens` tokens do not fit. Also raises ConfigError if `cache_tokens`
    is too small for one sequence of maximum length and one spare page for each slot."""
    requested, settings, max_length = requested_cache(model), model.settings, model.max_context_length
    budget_pages, context_pages = int(budget_bytes // requested.page_bytes), requested.context_pages
    copied = requested.copied_pages
    if settings.cache_tokens is None and not copied:
        # Reduce the pages before the slots, because a sequence takes only the pages that it fills.
        pages = min(requested.pages, budget_pages)
        slots = min(requested.slots, pages - 1 - context_pages)
        if settings.max_num_seqs is None:
            pages_per_slot = min(TOKENS_PER_DEFAULT_SLOT // PAGE_SIZE, context_pages + 1)
            default_slots = max(DEFAULT_SLOTS, pages // pages_per_slot)
            slots = min(slots, 1 << (default_slots.bit_length() - 1))
            requested = replace(requested, slots=slots)
    elif settings.cache_tokens is None:
        slots = min(requested.slots, (budget_pages - 1) // (context_pages + 1 + copied))
        pages = 1 + slots * (context_pages + 1)
    else:
        pages = requested.pages
        if copied:
            slots = min(requested.slots, (budget_pages - pages) // copied)
        else:
            slots = requested.slots if pages <= budget_pages else 0
    if slots < 1:
        # The two additional pages are a spare page and the null page, which pads block tables.
        too_large, minimum_pages = "max_context_length", context_pages + 2
        if settings.cache_tokens is not None:
            too_large, minimum_pages = "cache_tokens or max_context_length", pages
        needed = (minimum_pages + copied) * requested.page_bytes / 2**30
        raise ConfigError(
            f"max_context_length={max_length} cache_tokens={settings.cache_tokens}: the KV cache needs at "
            f"least {needed:.1f} GiB on each device, but {budget_bytes / 2**30:.1f} GiB are available; set a "
            f"smaller {too_large}"
        )
    if pages - 1 < context_pages + slots:
        raise ConfigError(
            f"cache_tokens={settings.cache_tokens} is too small for one {max_length}-token sequence and one "
            f"spare page for each of {slots} slots on each device: set "
            f"cache_tokens={(context_pages + slots) * PAGE_SIZE * settings.mesh.batch} or more, or a smaller "
            "max_context_length or max_num_seqs"
        )
    if slots < requested.slots:
        logger.warning(
            "max_num_seqs=%d: only %d sequences fit into %.1f GiB with max_context_length=%d; for more "
            "sequences, set a smaller max_context_length",
            requested.slots * settings.mesh.batch,
            slots * settings.mesh.batch,
            settings.mesh.batch * budget_bytes / 2**30,
            max_length,
        )
    elif pages < requested.pages:
        logger.info(
            "the KV cache has room for %d tokens of at most %d sequences",
            (pages - 1) * PAGE_SIZE * settings.mesh.batch,
            slots * settings.mesh.batch,
        )
    return replace(requested, slots=slots, pages=pages)
