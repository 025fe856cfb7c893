"""Read, tokenize and split the chats of a run, and divide them into batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched

from src.core.errors import ConfigError
from src.policy import chat as chat_template
from src.records.journal import GroupKey
from src.sft.chats import read_chats
from src.sft.config import DataOptions, SftConfig
from src.sft.rendering import TokenizedChat, render
from src.sft.run_data import chats_of_run, sources_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The tokenized chats to train on, and the held-out chats."""

    train: list[TokenizedChat]
    held_out: list[TokenizedChat]

    @property
    def num_trained_tokens(self) -> int:
        return sum(chat.sequence.num_trained for chat in self.train)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The chats of one training step."""

    step: int
    epoch: int
    chats: list[TokenizedChat]

    @property
    def keys(self) -> list[GroupKey]:
        """The keys of the chats in the journal. Equal chats of a batch have different keys."""
        hashes = [chat.content_hash for chat in self.chats]
        return [(self.step, f"{index}:{value}") for index, value in enumerate(hashes)]


def load(config: SftConfig, template: chat_template.Chat) -> Dataset:
    """Read, tokenize and split all chats.

    Raises ConfigError for an invalid chat, and for a held-out chat that is also trained.
    """

    def read_all(items: Sequence[str]) -> list[TokenizedChat]:
        chats: list[TokenizedChat] = []
        for path, condition in sources_of(items):
            if condition is not None:
                chats += chats_of_run(path, condition, config)
                continue
            for chat in read_chats(path):
                chats.append(
                    render(chat, template, train_on=config.train_on, context_limit=config.context_limit)
                )
        return chats

    train = read_all(config.data)
    if config.eval_data is None:
        return split(train, config)
    dataset = Dataset(train=train, held_out=read_all(config.eval_data))
    _require_held_out(dataset)
    return dataset


def split(chats: Sequence[TokenizedChat], options: DataOptions) -> Dataset:
    """Hold out the share `eval_split` of the tasks.

    If the share is above 0 and there are two or more tasks, at least one is held out and one is trained.
    Each chat of a file is one task, and equal chats are the same task. A chat from a run has the task of its
    trial. The choice depends on the tasks and the seed, not on the order of the chats.
    """
    tasks = {chat.task for chat in chats}
    if options.eval_split == 0 or len(tasks) < 2:
        return Dataset(train=list(chats), held_out=[])
    ordered = sorted(tasks, key=lambda task: hashlib.sha256(f"{options.seed}:{task}".encode()).digest())
    held_out = set(ordered[: min(len(ordered) - 1, max(1, round(options.eval_split * len(ordered))))])
    return Dataset(
        train=[chat for chat in chats if chat.task not in held_out],
        held_out=[chat for chat in chats if chat.task in held_out],
    )


def schedule(dataset: Dataset, config: SftConfig) -> list[Batch]:
    """Return the batches of all steps. An epoch has every chat once; its last batch may be smaller."""
    batches: list[Batch] = []
    for epoch in range(config.n_epochs):
        order = list(dataset.train)
        random.Random(f"{config.seed}:{epoch}").shuffle(order)
        for batch in batched(order, config.batch_size):
            batches.append(Batch(step=len(batches) + 1, epoch=epoch, chats=list(batch)))
    return batches[: config.max_steps]


def _require_held_out(dataset: Dataset) -> None:
    """Raise ConfigError if a chat or task is both trained and held out."""
    trained = {chat.task: chat.where for chat in dataset.train}
    for chat in dataset.held_out:
        if where := trained.get(chat.task):
            raise ConfigError(
                f"{chat.where}: the held-out chat or task is also trained ({where}); remove it from data or "
                "from eval_data"
            )
