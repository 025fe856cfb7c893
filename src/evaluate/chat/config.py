"""Options of `python -m src.evaluate.chat`. Model, server and length options are those of the trainer."""

from __future__ import annotations

import chz

from src.core.length_limits import LengthOptions
from src.core.options import at_least, finite, share
from src.policy.options import BackendOptions


@chz.chz
class ChatConfig(BackendOptions, LengthOptions):
    """What is sampled"""

    checkpoint: str | None = chz.field(
        default=None,
        doc="tinker:// path of a sampler checkpoint, or a run directory (its last checkpoint); None: base "
        "model",
    )
    system: str | None = chz.field(default=None, doc="System message; None: no system message")
    temperature: float = chz.field(default=0.7, doc="Sampling temperature", validator=[at_least(0), finite])
    top_p: float = chz.field(
        default=1.0,
        doc="Sample from the most likely tokens that together have this probability; 1: from all",
        validator=share,
    )
    enable_thinking: bool = chz.field(
        default=False,
        doc="Let the model think before each answer, if its chat template has the variable enable_thinking",
    )
