"""Options of `python -m src.sft`. The options of the run, the server and the optimizer are the trainer's."""

from __future__ import annotations

from typing import Literal

import chz

from src.config import LoopOptions
from src.core.options import SeedOptions, above, at_least, finite, require
from src.learning.options import OptimizerOptions
from src.policy.options import BackendOptions
from src.records.options import TrackingOptions

# The values of `train_on`, which select the trained tokens of a chat. The names are those of tinker-cookbook.
TrainOn = Literal[
    "all_assistant_messages", "last_assistant_turn", "last_assistant_message", "customized", "all_tokens"
]


@chz.chz
class DataOptions(SeedOptions):
    """Chats"""

    data: list[str] = chz.field(
        doc='JSON lines files of chats with the keys "messages" and, if the chat has tools, "tools"; or '
        "RUN,reward>=1: the training trials in the run directory RUN with a reward of at least 1"
    )
    eval_data: list[str] | None = chz.field(
        default=None,
        doc="Held-out chats, in the same form as data; None: the share eval_split of data is held out",
    )
    eval_split: float = chz.field(
        default=0.1,
        doc="Share of the chats that is held out if eval_data is None (with RUN: share of the run's tasks); "
        "0: none",
    )
    train_on: TrainOn = chz.field(
        default="all_assistant_messages",
        doc="Messages that are trained; last_assistant_turn: the assistant messages after the last user "
        'message; customized: the assistant messages with "trainable": true; all_tokens: all tokens up to '
        "the end of the last assistant message",
    )

    @chz.validate
    def _chats_can_be_split(self) -> None:
        require(0 <= self.eval_split < 1, f"eval_split must be at least 0 and below 1, not {self.eval_split}")


@chz.chz
class BatchOptions(SeedOptions):
    """Batches and schedule"""

    batch_size: int = chz.field(default=32, doc="Chats per step", validator=at_least(1))
    n_epochs: int = chz.field(default=1, doc="Passes over the chats", validator=at_least(1))
    max_steps: int | None = chz.field(
        default=None, doc="Stop after this many steps; None: all epochs", validator=at_least(1)
    )


@chz.chz
class RateOptions(OptimizerOptions):
    """Optimizer and loss"""

    learning_rate: float | None = chz.field(
        default=None,
        doc="Adam's learning rate; None: 5e-4 * (2000 / hidden size)^0.0775, with exponent 0.781 for Llama, "
        "or 5e-4 if the hidden size is unknown",
        validator=[above(0), finite],
    )


@chz.chz
class SftConfig(DataOptions, BatchOptions, RateOptions, LoopOptions, TrackingOptions, BackendOptions):
    """Training loop"""


def run_name(config: SftConfig, *, date: str) -> str:
    """Return the name of the run: `wandb_name`, or a name made from options and the date."""
    if config.wandb_name:
        return config.wandb_name
    model = config.model_name.replace("/", "-")
    return f"sft-{model}-rank{config.lora_rank}-b{config.batch_size}-{date}"
