"""How many sequences are decoded at once and how many pages hold their keys and values, in the memory there is."""

from __future__ import annotations

import logging
from dataclasses import replace

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.executor.resolved_model import ServedModel
from skyrl_tx_server.model.kv_cache import page_bytes
from skyrl_tx_server.model.shapes import PAGE
from skyrl_tx_server.sampling.model_runner import CacheSize, decodes_in_place

logger = logging.getLogger(__name__)


def asked_cache(model: ServedModel) -> CacheSize:
    """What the settings ask for: `cache_tokens`, or else a whole context for each of `max_num_seqs`."""
    settings, config = model.settings, model.config
    groups, whole = settings.mesh.batch, -(-model.context // PAGE)
    slots = settings.max_num_seqs // groups
    pages = (
        slots * (whole + 1) if settings.cache_tokens is None else -(-settings.cache_tokens // PAGE // groups)
    )
    return CacheSize(
        slots=slots,
        pages=1 + pages,
        page_bytes=page_bytes(config, model.dtype) // config.tensor_shards,
        context_pages=whole,
        copied_pages=0 if decodes_in_place(config) else whole,
    )


def fitting_cache(model: ServedModel, budget_bytes: float) -> CacheSize:
    """As much of it as fits into the budget. ConfigError where that is not one sequence of a whole context."""
    asked, settings, context = asked_cache(model), model.settings, model.context
    room, whole = int(budget_bytes // asked.page_bytes), asked.context_pages
    copied = asked.copied_pages
    if (
        settings.cache_tokens is None and not copied
    ):  # a row needs what pages it fills: fewer pages cost less than fewer rows
        pages = min(asked.pages, room)
        slots = min(asked.slots, pages - 1 - whole)
    elif settings.cache_tokens is None:
        slots = min(asked.slots, room // (whole + 1 + copied))
        pages = 1 + slots * (whole + 1)
    else:
        pages = asked.pages
        slots = min(asked.slots, (room - pages) // copied) if copied else asked.slots if pages <= room else 0
    if slots < 1:
        needed = (whole + copied) * asked.page_bytes / 2**30
        raise ConfigError(
            f"keys and values of one {context}-token sequence take {needed:.1f} GiB, {budget_bytes / 2**30:.1f} GiB are free for them: "
            "set a smaller max_context_length"
        )
    if pages - 1 < whole + slots:
        raise ConfigError(
            f"cache_tokens={settings.cache_tokens} is less than one {context}-token sequence and the beginnings of {slots} others on each "
            f"device: set cache_tokens={(whole + slots) * PAGE * settings.mesh.batch} or more, or a smaller max_context_length"
        )
    if slots < asked.slots:
        logger.warning(
            "max_num_seqs=%d: only %d sequences of %d tokens fit into %.1f GiB; a smaller max_context_length makes room for more",
            settings.max_num_seqs,
            slots * settings.mesh.batch,
            context,
            settings.mesh.batch * budget_bytes / 2**30,
        )
    elif pages < asked.pages:
        logger.info(
            "keys and values of %d tokens are kept, of up to %d sequences",
            (pages - 1) * PAGE * settings.mesh.batch,
            settings.max_num_seqs,
        )
    return replace(asked, slots=slots, pages=pages)
