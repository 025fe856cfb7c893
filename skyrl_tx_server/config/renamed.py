"""Former names of options and metrics. Each is accepted for one release, with a notice that names its replacement."""

from __future__ import annotations

from collections.abc import Mapping

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
