"""Options of `python -m src.evaluate.chat`. Those of the model, the server and lengths are the trainer's."""

from __future__ import annotations

import chz

from src.core.length_limits import LengthOptions
from src.core.options import at_least, share
from src.policy.options import BackendOptions


@chz.chz
class ChatConfig(BackendOptions, LengthOptions):
    """What is sampled"""

    checkpoint: str | None = chz.field(
        default=None,
        doc="tinker:// path of a sampler checkpoint, or a run folder (its last checkpoint); None: base model",
    )
    system: str | None = chz.field(default=None, doc="System message; None: none")
    temperature: float = chz.field(default=0.7, doc="Sampling temperature", validator=at_least(0))
    top_p: float = chz.field(
        default=1.0,
        doc="Sample from the most likely tokens that together have this probability; 1: from all",
        validator=share,
    )
    enable_thinking: bool = chz.field(
        default=False,
        doc="Let the model think before each answer, where its chat template has enable_thinking",
    )
