"""Chooses the number of decode slots and KV pages that fit into the available memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.resolved_model import ResolvedModel
from skyrl_tx_server.model.kv_cache import page_bytes
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.model_runner import CacheSize, decodes_in_place

logger = logging.getLogger(__name__)


def requested_cache(model: ResolvedModel) -> CacheSize:
    """Return the size that the options request: `cache_tokens`, or else a whole context for each of
    `max_num_seqs`."""
    settings, config = model.settings, model.config
    dp_ranks, whole = settings.mesh.batch, -(-model.context // PAGE_SIZE)
    slots = settings.max_num_seqs // dp_ranks
    pages = (
        slots * (whole + 1)
        if settings.cache_tokens is None
        else -(-settings.cache_tokens // PAGE_SIZE // dp_ranks)
    )
    return CacheSize(
        slots=slots,
        pages=1 + pages,
        page_bytes=page_bytes(config, model.dtype) // config.tensor_shards,
        context_pages=whole,
        copied_pages=0 if decodes_in_place(config) else whole,
    )


def fitting_cache(model: ResolvedModel, budget_bytes: float) -> CacheSize:
    """Return as much of the requested size as fits into the budget. Raises ConfigError if not even one whole
    context fits."""
    requested, settings, context = requested_cache(model), model.settings, model.context
    room, whole = int(budget_bytes // requested.page_bytes), requested.context_pages
    copied = requested.copied_pages
    if (
        settings.cache_tokens is None and not copied
    ):  # a sequence holds only the pages it fills, so fewer pages cost less than fewer slots
        pages = min(requested.pages, room)
        slots = min(requested.slots, pages - 1 - whole)
    elif settings.cache_tokens is None:
        slots = min(requested.slots, room // (whole + 1 + copied))
        pages = 1 + slots * (whole + 1)
    else:
        pages = requested.pages
        slots = (
            min(requested.slots, (room - pages) // copied)
            if copied
            else requested.slots
            if pages <= room
            else 0
        )
    if slots < 1:
        needed = (whole + copied) * requested.page_bytes / 2**30
        raise ConfigError(
            f"keys and values of one {context}-token sequence take {needed:.1f} GiB, {budget_bytes / 2**30:.1f} GiB are free for them: "
            "set a smaller max_context_length"
        )
    if pages - 1 < whole + slots:
        raise ConfigError(
            f"cache_tokens={settings.cache_tokens} is less than one {context}-token sequence and the beginnings of {slots} others on each "
            f"device: set cache_tokens={(whole + slots) * PAGE_SIZE * settings.mesh.batch} or more, or a smaller max_context_length"
        )
    if slots < requested.slots:
        logger.warning(
            "max_num_seqs=%d: only %d sequences of %d tokens fit into %.1f GiB; a smaller max_context_length makes room for more",
            settings.max_num_seqs,
            slots * settings.mesh.batch,
            context,
            settings.mesh.batch * budget_bytes / 2**30,
        )
    elif pages < requested.pages:
        logger.info(
            "the KV cache holds %d tokens of up to %d sequences",
            (pages - 1) * PAGE_SIZE * settings.mesh.batch,
            settings.max_num_seqs,
        )
    return replace(requested, slots=slots, pages=pages)
