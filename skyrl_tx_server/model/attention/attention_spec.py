"""The attention settings of a layer. The layers of a model may have different settings."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_tx_server.model.model_config import RopeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The attention settings of a layer, for training, prefill and decoding."""

    scale: float  # scores are scale * q . k
    rope: RopeSpec
    sliding_window: int | None = None  # number of visible positions, including the query's; None: no limit
