"""env=data: questions with reference answers from files. The user writes no environment class.

    data=train.jsonl test_data=test.parquet reward=number
    data=tasks.jsonl reward=my_module:grade environment_kwargs=question=problem,answer=result,max_answers=3

`data=` selects this environment. docs/environments.md describes the columns and the reward functions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.data.rewards import Reward, open_reward
from src.envs.data.rows import Columns, Question, read_questions, tasks_of
from src.envs.episodes import EnvSpec, episodes, split
from src.envs.message_env import MessageEnv, ResetResult, StepResult
from src.envs.options import EnvironmentOptions
from src.envs.service.tool_calls import without_thoughts
from src.policy.chat import Chat, Message

logger = logging.getLogger(__name__)

RETRY_MESSAGE = "That is not correct. Try again."
SOLVED = 1.0  # after an answer with at least this reward, the agent does not try again
FORMER_MAX_ANSWERS = "attempts"  # former name of the option max_answers; accepted for one release


class DataEnv:
    """One trial of one question. Implements `MessageEnv`.

    The agent answers the opening messages and each follow-up message. Only the answer to the last of these
    messages is graded. The reward function decides how the episode goes on:

    - It returns a message: the agent answers this message, and the rewards of both answers are added.
    - It returns no message and a reward below 1: the agent receives RETRY_MESSAGE and answers again, until
      `max_answers` answers without a message have been graded. Of these answers, only the reward of the last
      one counts.
    - It returns no message and a reward of at least 1: the episode ends.
    """

    def __init__(self, question: Question, reward: Reward, *, system: str = "", max_answers: int = 1) -> None:
        self._question = question
        self._reward = reward
        self._system = system
        self._follow_ups = list(question.follow_ups)
        self._num_answers_left = max_answers

    async def start(self) -> ResetResult:
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        opening = [*self._question.opening]
        if system and opening[0]["role"] == "system":
            del opening[0]
        return ResetResult(messages=[*system, *opening])

    async def step(self, answer: str) -> StepResult:
        if self._follow_ups:
            return StepResult(messages=[_user_message(self._follow_ups.pop(0))])
        graded = await self._reward.grade(without_thoughts(answer), self._question)
        if graded.message:
            return StepResult(
                messages=[_user_message(graded.message)], reward=graded.reward, metrics=graded.metrics
            )
        self._num_answers_left -= 1
        if graded.reward < SOLVED and self._num_answers_left > 0:
            return StepResult(messages=[_user_message(RETRY_MESSAGE)], metrics=graded.metrics)
        return StepResult(reward=graded.reward, is_done=True, metrics=graded.metrics)

    async def close(self) -> None:
        """There is nothing to release."""


def open_data(config: EnvironmentOptions, chat: Chat) -> TaskSource:
    """Return the task source of `data` and `test_data`. Raises ConfigError for invalid options or files."""
    return episodes(config, chat, _spec(config))


def check_data(config: EnvironmentOptions) -> None:
    """Raise the errors of `open_data`. Needs no server."""
    if FORMER_MAX_ANSWERS in config.environment_options:
        logger.warning("environment_kwargs: %s is a former name; use max_answers", FORMER_MAX_ANSWERS)
    split(_spec(config), config)


def _spec(config: EnvironmentOptions) -> EnvSpec:
    options = config.environment_options
    if unknown := options.keys() - {"question", "answer", "system", "max_answers", FORMER_MAX_ANSWERS}:
        raise ConfigError(
            f"environment_kwargs: env=data has no option {min(unknown)}; its options are question, answer, "
            "system and max_answers"
        )
    system, max_answers = read_system(options.get("system")), read_max_answers(options)
    reward = open_reward(str(config.reward))
    tasks, held_out = read_tasks(config, reward)

    def make(task: Task, seed: int) -> MessageEnv:
        question = task.row["question"]
        assert isinstance(question, Question)
        return DataEnv(question, reward, system=system, max_answers=max_answers)

    return EnvSpec(tasks=tasks, held_out=held_out, make=make, reads=["test_data"], close=reward.close)


def read_tasks(config: EnvironmentOptions, reward: Reward) -> tuple[list[Task], list[Task]]:
    """Return the tasks of `data` and those of `test_data`.

    Raises ConfigError with file and line for a row that `reward` cannot grade, or whose question is in both
    `data` and `test_data`. Also raises the errors of `read_questions` and `tasks_of`.
    """
    options = config.environment_options
    read = partial(
        _tasks_of_file, Columns(question=options.get("question"), answer=options.get("answer")), reward
    )
    tasks = [task for text in config.data or () for task in read(text)]
    tests = [task for text in config.test_data or () for task in read(text, may_be_named=True)]
    training_tasks = {task.instruction: task for task in tasks}
    for test in tests:
        if test.instruction in training_tasks:
            raise ConfigError(
                f"{_where(test)}: the question is also in {_where(training_tasks[test.instruction])}; "
                "remove it from data or from test_data"
            )
    return tasks, tests


def read_system(path: str | None) -> str:
    """Return the system message in the file `path`, or "" if `path` is None. Raises ConfigError if the file
    cannot be read."""
    try:
        return "" if path is None else Path(path).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"environment_kwargs system={path} cannot be read ({error}); name a text file"
        ) from error


def read_max_answers(options: dict[str, str]) -> int:
    text = options.get("max_answers", options.get(FORMER_MAX_ANSWERS, "1"))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"environment_kwargs max_answers={text} is not a positive number; write max_answers=NUMBER"
        )
    return int(text)


def _tasks_of_file(
    columns: Columns, reward: Reward, text: str, *, may_be_named: bool = False
) -> Sequence[Task]:
    name, _, place = text.partition("=") if may_be_named and "=" in text else ("", "", text)
    path = Path(place).expanduser()
    questions = read_questions(path, columns)
    for question in questions:
        reward.check(question)
    return tasks_of(questions, path, name=name)


def _where(task: Task) -> str:
    question = task.row["question"]
    assert isinstance(question, Question)
    return question.record.where


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}
