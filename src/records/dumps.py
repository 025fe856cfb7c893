"""Dumps of conversations from evaluations and from some training steps, one JSON line per trajectory.

    dumped_evals/global_step_<N>_evals/<data source>.jsonl  all trajectories, and aggregated_results.jsonl
    training_examples/step_<N>_examples.jsonl               steps 1, 11, 21, ...: one trajectory of ten tasks

The fields are those of the seeds' tools. `conversation` has messages without special tokens.
`output_response` has special tokens in evaluations, where tools count them, and none in training examples. A
failed dump is a warning and does not fail the step.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from src.core.trajectory import Task, Trajectory, TrajectoryGroup
from src.learning.played_groups import environment
from src.records.atomic_io import replace_text

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int], bool], str]  # of token ids; True leaves special tokens out
EXAMPLES_EVERY = 10
NUM_EXAMPLES = 10
SHOWN_CHARACTERS = 200
# DeepSeek writes its tokens with ｜ and ▁. Those of tool calls stay: they separate names and arguments.
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>|<｜(?!tool▁)[\w▁]+｜>")


def dump_evaluation(
    path: Path, step: int, groups: Sequence[TrajectoryGroup], metrics: Mapping[str, float], decode: Decode
) -> None:
    """Write one file per domain or family of tasks."""
    with _never_fatal():
        folder = path / "dumped_evals" / f"global_step_{step}_evals"
        by_source: dict[str, list[str]] = {}
        for group in groups:
            lines = [_line(eval_record(group.task, trajectory, decode)) for trajectory in group.trajectories]
            by_source.setdefault(environment(group.task), []).extend(lines)
        for source, lines in by_source.items():
            replace_text(folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', source)}.jsonl", "".join(lines))
        replace_text(folder / "aggregated_results.jsonl", _line(metrics))


def dump_examples(path: Path, step: int, groups: Sequence[TrajectoryGroup], decode: Decode) -> None:
    """Write the examples of steps 1, 11, 21, ... Tasks without a graded trial are left out."""
    if step % EXAMPLES_EVERY != 1:
        return
    with _never_fatal():
        chosen = [(group.task, group.trajectories[0]) for group in groups if group.trajectories][
            :NUM_EXAMPLES
        ]
        examples = [example_record(step, task, trajectory, decode) for task, trajectory in chosen]
        for record in examples:
            logger.info(
                "example of step %d, %s: %s",
                step,
                record["uid"],
                str(record["output_response"])[:SHOWN_CHARACTERS],
            )
        if examples:
            replace_text(
                path / "training_examples" / f"step_{step}_examples.jsonl", "".join(map(_line, examples))
            )


def eval_record(task: Task, trajectory: Trajectory, decode: Decode) -> dict[str, object]:
    family = environment(task)
    return {
        "input_prompt": decode(prompt_ids(trajectory), False),
        "output_response": decode(response_ids(trajectory), False),
        "score": trajectory.turn_rewards or [trajectory.reward],
        "stop_reason": trajectory.stop_reason,
        "env_class": family,
        "env_extras": dict(trajectory.metrics),
        "data_source": family,
        "conversation": conversation(trajectory, decode),
        "timestamp": datetime.now(UTC).isoformat(),
        "domain": family,
        "turns": len(trajectory.turns),
    }


def example_record(step: int, task: Task, trajectory: Trajectory, decode: Decode) -> dict[str, object]:
    return {
        "global_step": step,
        "uid": task.id,
        "conversation": conversation(trajectory, decode),
        "input_prompt": decode(prompt_ids(trajectory), True),
        "output_response": decode(response_ids(trajectory), True),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "timestamp": datetime.now(UTC).isoformat(),
    }


def conversation(trajectory: Trajectory, decode: Decode) -> list[dict[str, object]]:
    """Return the environment's messages if it kept them; otherwise the first prompt and the rest as text."""
    if trajectory.conversation and all(
        isinstance(message, Mapping) and "role" in message for message in trajectory.conversation
    ):
        return [without_special_tokens(message) for message in trajectory.conversation]
    texts = (
        ("user", decode(prompt_ids(trajectory), True).strip()),
        ("assistant", decode(response_ids(trajectory), True).strip()),
    )
    return [{"role": role, "content": text} for role, text in texts if text]


def without_special_tokens(message: Mapping[str, object]) -> dict[str, object]:
    """Remove special tokens that the model sampled as text."""
    content = message.get("content")
    return (
        {**message, "content": SPECIAL_TOKEN.sub("", content)} if isinstance(content, str) else dict(message)
    )


def prompt_ids(trajectory: Trajectory) -> list[int]:
    return list(trajectory.turns[0].prompt_ids) if trajectory.turns else []


def response_ids(trajectory: Trajectory) -> list[int]:
    """Return the tokens after the first prompt.

    After a rewritten history, only the last completion is returned.
    """
    if not trajectory.turns:
        return []
    first, last = trajectory.turns[0], trajectory.turns[-1]
    start = (
        len(first.prompt_ids)
        if last.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        else len(last.prompt_ids)
    )
    return [*last.prompt_ids[start:], *last.completion_ids]


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


@contextmanager
def _never_fatal() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("the dump failed: %s: %s", type(error).__name__, error)
