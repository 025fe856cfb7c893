"""Chats from the training trials of a run, for example `data=RUN,reward>=1`.

The condition selects the trials by their reward. The chats have the exact tokens that were sampled.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from src.core.errors import ConfigError
from src.learning.datums import sequences_of
from src.records.rollout_store import trained_trajectories
from src.records.run_directory import CONFIG_FILE, read_config
from src.sft.config import SftConfig
from src.sft.rendering import TokenizedChat, tokenized_chat

CONDITION = re.compile(r"reward(>=|>)(-?\d+(?:\.\d+)?)")
INCOMPLETE_CONDITION = re.compile(r"reward\s*([<>=].*)?")
"""Matches an incomplete or unsupported condition. A shell turns data=RUN,reward>=1 without quotes into
data=RUN,reward."""
COMPARISONS = {">=": operator.ge, ">": operator.gt}


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition on the reward, which selects trials of a run."""

    comparison: str
    reward: float

    def holds(self, reward: float) -> bool:
        """Return whether `reward` meets the condition.

        >>> Condition(comparison=">=", reward=1).holds(1.0), Condition(comparison=">", reward=1).holds(1.0)
        (True, False)
        """
        return COMPARISONS[self.comparison](reward, self.reward)


def sources_of(items: Sequence[str]) -> list[tuple[Path, Condition | None]]:
    """Return a pair (path, condition) for each source. The condition of a file of chats is None.

    Raises ConfigError for an incomplete condition, a condition that does not follow a path, a second
    condition of a path, and a run directory without a condition.

    >>> ((path, condition),) = sources_of(["RUN", "reward>=0.5"])
    >>> str(path), condition.reward
    ('RUN', 0.5)
    """
    sources: list[tuple[Path, Condition | None]] = []
    for item in items:
        if match := CONDITION.fullmatch(item):
            if not sources:
                raise ConfigError(
                    f'data={item} has no run directory before it; write "data=RUN,{item}", with the quotes'
                )
            if sources[-1][1] is not None:
                raise ConfigError(f"data={item}: {sources[-1][0]} already has a condition; remove one")
            condition = Condition(comparison=match[1], reward=float(match[2]))
            sources[-1] = (sources[-1][0], condition)
        elif INCOMPLETE_CONDITION.fullmatch(item):
            raise ConfigError(f'data={item} is not a condition; write "data=RUN,reward>=1", with the quotes')
        else:
            sources.append((Path(item).expanduser(), None))
    for path, condition in sources:
        if condition is None and (path / CONFIG_FILE).is_file():
            raise ConfigError(f'{path} is a run directory; write "data={path},reward>=1", with the quotes')
    return sources


def chats_of_run(run: Path, condition: Condition, config: SftConfig) -> list[TokenizedChat]:
    """Return the sequences of the run's training trials whose reward meets the condition.

    Every sampled token is trained. Raises ConfigError if no trial meets the condition, if a sequence exceeds
    `context_limit`, if the run used another tokenizer, or if `train_on` is not its default.
    """
    if config.train_on != "all_assistant_messages":
        raise ConfigError(
            f"train_on={config.train_on} selects messages of chats, but {run} is a run directory; "
            "use train_on=all_assistant_messages"
        )
    _require_same_tokenizer(run, config)
    chosen = [trial for trial in trained_trajectories(run) if condition.holds(trial.reward)]
    if not chosen:
        raise ConfigError(
            f"{run} has no training trial with reward{condition.comparison}{condition.reward:g}; "
            "lower the bound, or give another run"
        )
    return [
        tokenized_chat(
            sequence.tokens.tolist(),
            sequence.sampled.tolist(),
            where=f"{run}, trial {trial.trial_name or trial.task_id}",
            context_limit=config.context_limit,
            task=trial.task_id,
        )
        for trial in chosen
        for sequence in sequences_of(trial.turns, advantage=1.0)
    ]


def _require_same_tokenizer(run: Path, config: SftConfig) -> None:
    """Raise ConfigError if `run` used a tokenizer with another name than this fine-tuning, or if its
    configuration cannot be read."""
    saved = read_config(run)
    run_tokenizer = saved.get("tokenizer") or saved.get("model_name")
    tokenizer = config.tokenizer or config.model_name
    if run_tokenizer != tokenizer:
        raise ConfigError(
            f"{run} has tokens of tokenizer {run_tokenizer}, but this fine-tuning uses {tokenizer}; if "
            f"both names mean the same tokenizer, write tokenizer={run_tokenizer}"
        )
