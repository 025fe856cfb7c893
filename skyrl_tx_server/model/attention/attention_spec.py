"""How the heads of a layer attend, as far as layers of one model may differ."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_tx_server.model.model_config import RopeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention of a layer. Every implementation (training, prefill, decoding) reads it."""

    scale: float  # scores are scale * q . k
    rope: RopeSpec
    sliding_window: int | None = (
        None  # a query sees this many positions, its own included; None: all before it
    )
