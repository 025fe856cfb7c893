"""`python -m src.try_env data=FILE|env=NAME|tasks_dir=DIR`: play a few trials of an environment before a run.

The command prints each conversation with its reward, and then the pass rate. Who answers is `policy`:

    policy=model     a model of a Tinker endpoint or of an OpenAI-compatible endpoint; the default with
                     model_name
    policy=typed     the user, at the terminal; the default at a terminal
    policy=scripted  the lines of answers=FILE or, with data=, the reference answers; needs no server

Exit status: 0, 1 (no trial could be graded), 2 (wrong options), 130 (interrupted).
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import chz
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from src.cli.command_line import help_for, parse_as, print_help
from src.cli.console import terminal
from src.cli.environment_variables import load_environment, with_server_from_environment
from src.core.errors import INTERRUPTED, BackendError, ConfigError, TrainerError
from src.core.process import exit_on_signal, exit_process, run_until_signal
from src.core.token_ids import TokenIds
from src.core.trajectory import StopReason, Task, Trajectory, TrajectoryGroup, TrialFailure, Turn
from src.envs.base import TaskSource, close_quietly
from src.envs.data.rows import Question, require_reference
from src.envs.registry import check_environment, open_task_source
from src.evaluate.config import EvaluateConfig, trainer_option
from src.evaluate.run import chosen, open_evaluated, sampler_path
from src.learning.played_groups import SOLVED
from src.policy.openai_client import END, MessageCodec, endpoint_chat
from src.policy.sampling_policy import Policy, SampleRequest

TITLE = [
    "python -m src.try_env key=value ...",
    "",
    "Plays a few trials of an environment and prints them with their rewards and the pass rate.",
]
STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
NO_SERVER = "http://unused"  # typed and scripted answers need no server, but the options name one
MAX_CHARACTERS = 2000  # of a message that is shown

PolicyFor = Callable[[Task], Policy]


@chz.chz
class TryConfig:
    """What is tried"""

    env: str = trainer_option("env")
    data: list[str] | None = trainer_option("data")
    reward: str | None = trainer_option("reward")
    test_data: list[str] | None = trainer_option("test_data")
    tasks_dir: str | None = trainer_option("tasks_dir")
    environment_type: Literal["auto", "docker", "sandbox", "daytona", "modal", "e2b", "runloop"] = (
        trainer_option("environment_type")
    )
    environment_kwargs: list[str] | None = trainer_option("environment_kwargs")
    tau2_home: str | None = trainer_option("tau2_home")
    tasks: list[str] | None = chz.field(
        default=None, doc="Only these tasks: ids or globs; None: the first n_tasks"
    )
    n_tasks: int = chz.field(default=3, doc="Number of tasks to play")
    n_samples: int = chz.field(default=1, doc="Trials per task")

    policy: Literal["auto", "model", "typed", "scripted"] = chz.field(
        default="auto",
        doc="Who answers; auto: model with model_name, else typed at a terminal, else scripted",
    )
    answers: str | None = chz.field(
        default=None, doc="Text file with one answer per line, for policy=scripted; the last one is repeated"
    )
    model_name: str | None = chz.field(
        default=None, doc="Model as the server or the endpoint names it, for policy=model"
    )
    checkpoint: str | None = chz.field(
        default=None, doc="tinker:// path of a sampler checkpoint, or a run folder; None: base model"
    )
    base_url: str | None = chz.field(
        default=None, doc="OpenAI-compatible endpoint in place of a Tinker endpoint; key: OPENAI_API_KEY"
    )
    backend: Literal["tinker", "skyrl-tx"] = trainer_option("backend")
    skyrl_tx_url: str | None = trainer_option("skyrl_tx_url")
    tinker_base_url: str | None = trainer_option("tinker_base_url")
    tokenizer: str | None = trainer_option("tokenizer")
    temperature: float = trainer_option("temperature")
    seed: int = trainer_option("seed")
    max_turns: int | None = trainer_option("max_turns")
    max_tokens: int = trainer_option("max_tokens")
    context_limit: int = trainer_option("context_limit")
    enable_summarize: bool = trainer_option("enable_summarize")
    use_native_tool_calling: bool = trainer_option("use_native_tool_calling")
    n_parallel_envs: int = trainer_option("n_parallel_envs")

    @property
    def evaluation(self) -> EvaluateConfig:
        """The options of an evaluation of the same tasks. Raises ValueError for options that it rejects."""
        own = ("n_tasks", "policy", "answers")
        shared = {name: getattr(self, name) for name in chz.chz_fields(TryConfig) if name not in own}
        if self.kind != "model":
            shared |= {"model_name": self.kind, "base_url": NO_SERVER, "use_native_tool_calling": False}
        return EvaluateConfig(**shared)

    @property
    def kind(self) -> str:
        """The policy that `auto` stands for."""
        if self.policy != "auto":
            return self.policy
        if self.model_name is not None:
            return "model"
        return "typed" if sys.stdin.isatty() and self.answers is None else "scripted"

    @chz.validate
    def _options_are_valid(self) -> None:
        for name in ("n_tasks", "n_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.answers is not None and self.kind != "scripted":
            raise ValueError(f"answers is for policy=scripted, not policy={self.kind}; remove one of them")
        assert self.evaluation.trials


class AnsweringPolicy:
    """A policy whose answers come from `answer`, a function of the messages so far. Implements `Policy`."""

    def __init__(self, answer: Callable[[Sequence[dict[str, str]]], str]) -> None:
        self.version = 0
        self._answer = answer
        self._codec = MessageCodec()

    async def sample(self, request: SampleRequest) -> Turn:
        text = await asyncio.to_thread(self._answer, self._codec.messages(request.prompt_ids))
        ids = self._codec.encode(text.replace(END, "") + END, add_special_tokens=False)
        completion = ids[: request.max_tokens]
        return Turn(
            prompt_ids=TokenIds.wrap(request.prompt_ids),
            completion_ids=completion,
            logprobs=[math.nan] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(ids) else StopReason.LENGTH,
            policy_version=0,
        )


def scripted(lines: Sequence[str]) -> Policy:
    """Return a policy that says the lines in order and repeats the last one."""

    def answer(messages: Sequence[dict[str, str]]) -> str:
        num_said = sum(message["role"] == "assistant" for message in messages)
        return lines[min(num_said, len(lines) - 1)]

    return AnsweringPolicy(answer)


def typed(console: Console) -> Policy:
    """Return a policy that shows the new messages and reads the answer from the terminal."""

    def answer(messages: Sequence[dict[str, str]]) -> str:
        said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for message in messages[said[-1] + 1 if said else 0 :]:
            console.print(shown(message["role"], message["content"]))
        try:
            return console.input("[bold green]answer>[/] ")
        except EOFError as error:
            raise BackendError("standard input ended before the trial") from error

    return AnsweringPolicy(answer)


def policy_for_scripted(config: TryConfig) -> PolicyFor:
    """Return the scripted policy of each task. Raises ConfigError without answers."""
    if config.answers is not None:
        try:
            lines = Path(config.answers).expanduser().read_text().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"answers={config.answers} cannot be read ({error}); name a text file"
            ) from error
        if not lines:
            raise ConfigError(f"answers={config.answers} has no lines; write one answer per line")
        return lambda task: scripted(lines)

    def with_reference(task: Task) -> Policy:
        question = task.row.get("question")
        if not isinstance(question, Question):
            raise ConfigError(
                "policy=scripted needs answers=FILE with one answer per line, because only data= has "
                "reference answers"
            )
        reference = require_reference(question)
        return scripted([*[reference] * len(question.follow_ups), reference])

    return with_reference


@asynccontextmanager
async def opened(config: TryConfig, console: Console) -> AsyncIterator[tuple[TaskSource, PolicyFor]]:
    """Open the tasks and the policy."""
    evaluation = config.evaluation
    if config.kind == "model":
        async with open_evaluated(evaluation, sampler_path(config.checkpoint)) as evaluated:
            try:
                yield evaluated.source, lambda task: evaluated.policy
            finally:
                await close_quietly(evaluated.source)
        return
    await asyncio.to_thread(check_environment, evaluation.trials)
    source = await asyncio.to_thread(open_task_source, evaluation.trials, endpoint_chat())
    try:
        yield (
            source,
            policy_for_scripted(config) if config.kind == "scripted" else lambda task: typed(console),
        )
    finally:
        await close_quietly(source)


async def run(config: TryConfig, console: Console, statuses: list[int]) -> None:
    """Play the trials and print them. Appends the exit status to `statuses`."""
    async with opened(config, console) as (source, policy_for):
        tasks = chosen([*source.train, *source.eval], config.tasks)[: config.n_tasks]
        slots = asyncio.Semaphore(1 if config.kind == "typed" else config.n_parallel_envs)
        with tempfile.TemporaryDirectory() as folder:

            async def play(task: Task, member: int) -> Trajectory | TrialFailure:
                async with slots:
                    trial = source.trial(
                        task,
                        directory=Path(folder),
                        seed=config.seed + member,
                        temperature=config.temperature,
                        member=member,
                    )
                    result = await trial.run(policy_for(task))
                console.print(trial_panel(task, member, result, with_messages=config.kind != "typed"))
                return result

            groups: list[TrajectoryGroup] = []
            results = await asyncio.gather(
                *(play(task, member) for task in tasks for member in range(config.n_samples))
            )
            for number, task in enumerate(tasks):
                members = results[number * config.n_samples : (number + 1) * config.n_samples]
                groups.append(
                    TrajectoryGroup(
                        task=task,
                        trajectories=[member for member in members if isinstance(member, Trajectory)],
                        failures=[member for member in members if isinstance(member, TrialFailure)],
                    )
                )
    for content in summary(groups, config):
        console.print(content)
    statuses.append(0 if any(group.trajectories for group in groups) else 1)


def shown(role: str, content: str) -> Text:
    if len(content) > MAX_CHARACTERS:
        content = f"{content[:MAX_CHARACTERS]} ... ({len(content) - MAX_CHARACTERS} more characters)"
    return Text.assemble((f"{role}: ", f"bold {STYLES.get(role, 'white')}"), content)


def trial_panel(task: Task, member: int, result: Trajectory | TrialFailure, *, with_messages: bool) -> Panel:
    """Return the conversation of a trial with its reward, or the reason why it has none."""
    title = f"{task.id}, trial {member + 1}"
    if isinstance(result, TrialFailure):
        return Panel(
            Text(f"{result.kind}: {result.message}", "red"), title=f"{title}: not graded", title_align="left"
        )
    messages = result.conversation if with_messages else ()
    lines = [shown(str(message.get("role")), str(message.get("content"))) for message in messages]
    if result.zero_reason is not None:
        lines.append(Text(f"{result.zero_reason}: {result.zero_detail}", "red"))
    metrics = ", ".join(
        f"{name} {value:g}" for name, value in result.metrics.items() if name != "duration_s" and value
    )
    end = f"{len(result.turns)} turns, ended by {result.stop_reason}{f'; {metrics}' if metrics else ''}"
    return Panel(
        Group(*lines, Text(end, "dim")), title=f"{title}: reward {result.reward:g}", title_align="left"
    )


def summary(groups: Sequence[TrajectoryGroup], config: TryConfig) -> list[Table | Text]:
    """Return a row per task, and the pass rate of all trials."""
    table = Table(box=None, padding=(0, 1))
    for heading in ("task", "solved", "rewards", "not graded"):
        table.add_column(heading, no_wrap=heading == "task")
    for group in groups:
        solved = sum(reward >= SOLVED for reward in group.rewards)
        rewards = " ".join(f"{reward:g}" for reward in group.rewards)
        table.add_row(
            group.task.id, f"{solved}/{len(group.rewards)}", rewards, str(len(group.failures) or "")
        )
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        return [table, Text("no trial could be graded", "red")]
    num_solved = sum(reward >= SOLVED for reward in rewards)
    lines = [
        f"pass rate ({config.kind}): {num_solved / len(rewards):.1%} ({num_solved}/{len(rewards)} trials)"
    ]
    if config.kind == "model" and config.n_samples > 1:
        num_mixed = sum(len(set(group.rewards)) > 1 for group in groups)
        lines.append(f"tasks whose rewards differ, from which GRPO learns: {num_mixed} of {len(groups)}")
    return [table, *map(Text, lines)]


def main(argv: Sequence[str]) -> int:
    """Play the trials and return the exit status."""
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print_help(help_for(TryConfig, title=TITLE))
        return 0
    load_environment(argv)
    statuses: list[int] = []
    console = terminal()
    try:
        with exit_on_signal():
            config = parse_as(TryConfig, with_server_from_environment(argv))
            status = asyncio.run(run_until_signal(run(config, console, statuses), console.print))
            return status or statuses[0]
    except KeyboardInterrupt:
        return INTERRUPTED
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
