"""The attention of a layer: the settings in which the layers of a model may differ."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_tx_server.model.model_config import RopeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of a layer. Every implementation (training, prefill, decoding) reads it."""

    scale: float  # scores are scale * q . k
    rope: RopeSpec
    sliding_window: int | None = None  # positions that a query sees, with its own; None: all up to its own
