"""Dumps of conversations from evaluations and from some training steps, one JSON line per trajectory.

    dumped_evals/global_step_<N>_evals/<data source>.jsonl        all trajectories of the evaluation after
                                                                  step N
    dumped_evals/global_step_<N>_evals/aggregated_results.jsonl   the metrics of this evaluation
    training_examples/step_<N>_examples.jsonl                     in steps 1, 11, 21, ...: one trajectory of
                                                                  each of up to ten tasks

These fields have the names and contents of SkyRL's dumps:

    input_prompt          the first prompt
    output_response       the text after the first prompt
    score                 a list: the rewards of the turns or, if the environment gives none, only the
                          reward of the trial. The trial counts as passed if their sum is above 0
    reward                the reward of the trial
    env_class             the environment (`env=`)
    data_source, domain   the domain, or the task type of a task without a domain
    env_extras            task_key, data_source, trial (its name), member, seed, zero_reason if there is one,
                          and the metrics of the trial. Lines with the same task_key are trials of the same
                          task
    conversation          the messages without special tokens, with `tool_calls` in assistant messages and
                          `name` in tool messages
    conversation_history  the same value as `conversation`

Only evaluations have `score`, `env_class`, `data_source` and `domain`, and only training examples have
`reward`. In dumps of evaluations, the prompt and the response include the special tokens, because programs
that read these dumps count the special tokens to find the number of turns. In training examples, the special
tokens are left out.

A dump or an upload that fails is reported, and the run continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from src.core.errors import ConfigError, TrainerError
from src.core.token_ids import starts_with
from src.core.trajectory import Task, Trajectory, TrajectoryGroup
from src.learning.rollout_groups import domain_or_task_type
from src.records.atomic_io import readable, replace_text
from src.records.metrics_table import with_aliases
from src.records.tracking import finite
from src.records.uploads import upload

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int], bool], str]  # (token ids, whether to leave out special tokens) -> text
AGGREGATED = "aggregated_results.jsonl"
EXAMPLES_EVERY = 10  # number of steps between two dumps of training examples
ADVICE = "free space or fix the cause; the run continues without this file"
NUM_EXAMPLES = 10  # the maximum number of examples of a step
SHOWN_CHARACTERS = 200  # number of characters of an example's response in the log line
# DeepSeek's special tokens contain ｜ and ▁. The special tokens of its tool calls are kept, because they
# separate names and arguments.
SPECIAL_TOKEN = re.compile(r"<\|\w+\|>|<｜(?!tool▁)[\w▁]+｜>")


def check_export_path(path: str) -> None:
    """Create the directory `path` for dumps. Raises ConfigError if files cannot be written to it."""
    directory = Path(path).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"export_path={path} cannot be written: {error.strerror}; give another directory"
        ) from error


async def dump(
    write: Callable[[], Sequence[Path]], *, upload_to: str | None, say: Callable[[str], None]
) -> None:
    """Write files with `write`, and upload them to the directory `upload_to`, an fsspec URL; None: no upload.

    An error is logged and reported with `say`.
    """
    try:
        files = await asyncio.to_thread(write)
        if upload_to is not None and files:
            await upload(files, upload_to)
    except Exception as error:
        reason = str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
        logger.warning("the dump failed: %s", reason)
        say(f"the dump failed: {reason}")


def dump_evaluation(
    path: Path,
    step: int,
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, float],
    decode: Decode,
    *,
    env_class: str,
) -> list[Path]:
    """Write one file per domain or task type, and the metrics. Return the files.

    Domains share a file if their names differ only in characters that become `_` in file names.
    """
    directory = path / "dumped_evals" / f"global_step_{step}_evals"
    by_file: dict[Path, list[str]] = {}
    for group in groups:
        lines = [
            _line(eval_record(group.task, trajectory, decode, env_class=env_class))
            for trajectory in group.trajectories
        ]
        name = f"{re.sub(r'[^\w.-]', '_', domain_or_task_type(group.task))}.jsonl"
        by_file.setdefault(directory / name, []).extend(lines)
    by_file[directory / AGGREGATED] = [_line(finite(with_aliases(metrics)))]
    for file, lines in by_file.items():
        replace_text(file, "".join(lines), advice=ADVICE)
    return list(by_file)


def dump_examples(path: Path, step: int, groups: Sequence[TrajectoryGroup], decode: Decode) -> list[Path]:
    """Write the examples of steps 1, 11, 21, ..., and return the files. Tasks without a graded trial are left
    out."""
    chosen = [(group.task, group.trajectories[0]) for group in groups if group.trajectories][:NUM_EXAMPLES]
    if step % EXAMPLES_EVERY != 1 or not chosen:
        return []
    examples = [example_record(step, task, trajectory, decode) for task, trajectory in chosen]
    for record in examples:
        response = str(record["output_response"])[:SHOWN_CHARACTERS]
        logger.info("example of step %d, %s: %s", step, record["uid"], response)
    file = path / "training_examples" / f"step_{step}_examples.jsonl"
    replace_text(file, "".join(map(_line, examples)), advice=ADVICE)
    return [file]


def eval_record(task: Task, trajectory: Trajectory, decode: Decode, *, env_class: str) -> dict[str, object]:
    data_source = domain_or_task_type(task)
    return _trial_record(task, trajectory, decode, skip_special_tokens=False) | {
        "score": trajectory.turn_rewards or [trajectory.reward],
        "env_class": env_class,
        "data_source": data_source,
        "domain": data_source,
        "turns": len(trajectory.turns),
    }


def example_record(step: int, task: Task, trajectory: Trajectory, decode: Decode) -> dict[str, object]:
    record = {"global_step": step, "uid": task.id, "reward": trajectory.reward}
    return record | _trial_record(task, trajectory, decode, skip_special_tokens=True)


def _trial_record(
    task: Task, trajectory: Trajectory, decode: Decode, *, skip_special_tokens: bool
) -> dict[str, object]:
    """Return the fields that both kinds of records have."""
    messages = conversation(trajectory, decode)
    return {
        "input_prompt": decode(prompt_ids(trajectory), skip_special_tokens),
        "output_response": decode(response_ids(trajectory), skip_special_tokens),
        "conversation": messages,
        "conversation_history": messages,
        "stop_reason": trajectory.stop_reason,
        "env_extras": env_extras(task, trajectory),
        "timestamp": datetime.now(UTC).isoformat(),
    }


def env_extras(task: Task, trajectory: Trajectory) -> dict[str, object]:
    """Return the metrics of a trial, its graded-zero reason if any, and the fields that identify it."""
    identity = {
        "task_key": task.id,
        "data_source": domain_or_task_type(task),
        "trial": trajectory.trial_name,
        "member": trajectory.member,
        "seed": trajectory.seed,
    }
    reason = {"zero_reason": trajectory.zero_reason} if trajectory.zero_reason else {}
    return {**finite(trajectory.metrics), **identity, **reason}


def conversation(trajectory: Trajectory, decode: Decode) -> list[dict[str, object]]:
    """Return the messages that the environment recorded.

    If the environment recorded no message, or an entry without a role, return two messages: the text of the
    first prompt, and the text after the first prompt. An empty text gives no message.
    """
    if trajectory.conversation and all(map(_has_role, trajectory.conversation)):
        return [
            without_special_tokens({**message, **trajectory.tool_fields.get(index, {})})
            for index, message in enumerate(trajectory.conversation)
        ]
    texts = (
        ("user", decode(prompt_ids(trajectory), True).strip()),
        ("assistant", decode(response_ids(trajectory), True).strip()),
    )
    return [{"role": role, "content": text} for role, text in texts if text]


def _has_role(message: object) -> bool:
    return isinstance(message, Mapping) and "role" in message


def without_special_tokens(message: Mapping[str, object]) -> dict[str, object]:
    """Remove special tokens from the content, because the content of an answer contains them as text."""
    content = message.get("content")
    return (
        {**message, "content": SPECIAL_TOKEN.sub("", content)} if isinstance(content, str) else dict(message)
    )


def prompt_ids(trajectory: Trajectory) -> list[int]:
    """Return the tokens of the first prompt, or an empty list if nothing was sampled."""
    return list(trajectory.turns[0].prompt_ids) if trajectory.turns else []


def response_ids(trajectory: Trajectory) -> list[int]:
    """Return the tokens after the first prompt, or only the last completion if the last prompt does
    not start with the first prompt."""
    if not trajectory.turns:
        return []
    first, last = trajectory.turns[0], trajectory.turns[-1]
    is_continued = starts_with(last.prompt_ids, first.prompt_ids)
    start = len(first.prompt_ids if is_continued else last.prompt_ids)
    return [*last.prompt_ids[start:], *last.completion_ids]


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(readable(record), ensure_ascii=False) + "\n"
