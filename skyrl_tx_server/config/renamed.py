"""Former names of options, statistics and metrics. The server accepts or returns each of them for one
release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

RENAMED_OPTIONS: Mapping[str, str] = {
    "compile_ahead": "warmup",
    "decode_block": "decode_steps_per_dispatch",
    "decode_slots": "max_num_seqs",
    "max_snapshots": "max_loras",
    "sampled_logprobs": "logprobs_mode",
    "stretch_context": "yarn",
}
"""Former option -> option."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("sampled_logprobs", "model"): "raw",
    ("sampled_logprobs", "tempered"): "processed",
}
"""Former option and its value -> value of the option that replaces it."""

RENAMED_STATISTICS: Mapping[str, str] = {
    "cache_pages_remembered": "cache_pages_cached",
    "decode_blocks": "decode_dispatches",
    "decode_blocks_ahead": "decode_dispatches_ahead",
    "pauses": "num_pauses",
    "preemptions": "num_preemptions",
    "rows_paused": "sequences_paused",
    "rows_set_aside": "sequences_preempted",
    "turn_seconds": "work_seconds",
}
"""Former field of the engine's statistics -> field. `GET /api/v1/stats` returns both."""


class FormerMetric(NamedTuple):
    """The name of a metric in /metrics before it was renamed, and the name of its label if that was renamed
    too."""

    name: str
    label: str | None = None


RENAMED_METRICS: Mapping[str, FormerMetric] = {
    "decode_dispatches_ahead_total": FormerMetric("decode_blocks_ahead_total"),
    "decode_dispatches_total": FormerMetric("decode_blocks_total"),
    "work_seconds_total": FormerMetric("turn_seconds_total", label="turn"),
}
"""Metric -> former metric. `GET /metrics` returns both."""

RENAMED_LABEL_VALUES: Mapping[tuple[str, str], str] = {("cache_pages", "cached"): "remembered"}
"""Metric and value of its label -> former value. `GET /metrics` returns both."""
