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
"""Former option -> present option."""

RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("sampled_logprobs", "model"): "raw",
    ("sampled_logprobs", "tempered"): "processed",
}
"""(former option, former value) -> value of the present option."""

RENAMED_STATISTICS: Mapping[str, str] = {
    "cache_pages_remembered": "cache_pages_cached",
    "decode_blocks": "decode_dispatches",
    "decode_blocks_ahead": "decode_dispatches_ahead",
    "pauses": "num_pauses",
    "preemptions": "num_preemptions",
    "rows_paused": "sequences_paused",
    "rows_set_aside": "sequences_preempted",
    "tokens_sampled_elsewhere": "tokens_sampled_externally",
    "turn_seconds": "work_seconds",
}
"""Former field of the engine's statistics -> present field. `GET /api/v1/stats` returns both."""


class FormerMetric(NamedTuple):
    """The former name of a metric in /metrics, and the former name of its label."""

    name: str
    label: str | None = None  # None: the label was not renamed


RENAMED_METRICS: Mapping[str, FormerMetric] = {
    "decode_dispatches_ahead_total": FormerMetric("decode_blocks_ahead_total"),
    "decode_dispatches_total": FormerMetric("decode_blocks_total"),
    "work_seconds_total": FormerMetric("turn_seconds_total", label="turn"),
}
"""Present metric -> former metric. `GET /metrics` returns both."""

RENAMED_LABEL_VALUES: Mapping[tuple[str, str], str] = {
    ("cache_pages", "cached"): "remembered",
    ("tokens_total", "sampled_externally"): "sampled_elsewhere",
}
"""(present metric, present value of its label) -> former value of the label. `GET /metrics` returns both."""
