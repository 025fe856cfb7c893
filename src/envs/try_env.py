"""`python -m src.envs.try_env data=FILE|env=NAME|tasks_dir=DIR`: run a few trials of an environment.

The command prints each conversation with its reward, and then the pass rate. The option `policy` selects the
source of the answers:

    policy=model     a model of a Tinker or an OpenAI-compatible endpoint; the default with model_name
    policy=typed     the user; the default at a terminal without model_name and answers=
    policy=scripted  the lines of answers=FILE or, with data=, the reference answers; the default if none of
                     the other two is the default

Only policy=model needs a server for the answers.

Exit status: 0, 1 (the connection to the model or the start of the environment failed, no trial could be
graded, or the environment raised an error in each graded trial), 2 (an error that the user can correct, for
example in an option, a file or the address of a server), 130 (interrupted).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Literal

import chz
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from src.cli.command_line import help_for, parse_as, with_present_names
from src.cli.config_file import with_config_files
from src.cli.console import message_text, terminal
from src.cli.environment_variables import load_environment, with_locations_from_environment
from src.cli.program import run_program
from src.core.errors import BackendError, ConfigError
from src.core.options import at_least, require
from src.core.printable import printable
from src.core.process import deadline, exit_on_signal, exit_process, run_until_signal
from src.core.trajectory import Task, Trajectory, TrajectoryGroup, TrialFailure, ZeroReason
from src.core.wait_notice import MAY_COMPILE, WaitNotice
from src.envs.answering_policy import AnsweringPolicy, scripted
from src.envs.base import TaskSource, close_quietly, run_trial
from src.envs.data.rows import Question, require_reference
from src.envs.options import EnvironmentOptions, HarborOptions, TauBenchOptions, environment_options
from src.envs.registry import check_environment, open_task_source
from src.envs.splits import chosen_tasks
from src.envs.try_server import with_backend, with_local_server
from src.learning.rollout_groups import SOLVED
from src.policy.backend import connect
from src.policy.chat import Chat, load_chat
from src.policy.openai_client import EndpointPolicy, connect_endpoint, endpoint_chat
from src.policy.sampling_policy import Policy
from src.policy.served_model import fitted_to_server, with_served_model
from src.records.checkpoints import sampler_path

TITLE = [
    "python -m src.envs.try_env key=value ...",
    "",
    "Runs a few trials of an environment and prints them with their rewards and the pass rate.",
]
NO_SERVER = "http://unused"  # for typed and scripted answers; the options require an address

PolicyFor = Callable[[Task], Policy]


@chz.chz
class TryConfig(HarborOptions, TauBenchOptions):
    """Tasks, policy and endpoint"""

    model_name: str = chz.field(
        default="", doc="Model as the server or the endpoint names it, for policy=model"
    )
    tasks: list[str] | None = chz.field(
        default=None, doc="Ids or globs; the first n_tasks matching tasks are run; None: all tasks match"
    )
    n_tasks: int = chz.field(default=3, doc="Maximum number of tasks to run", validator=at_least(1))
    n_samples: int = chz.field(default=1, doc="Trials per task", validator=at_least(1))
    policy: Literal["auto", "model", "typed", "scripted"] = chz.field(
        default="auto",
        doc="Source of answers. auto: model if model_name is set; otherwise typed if standard input is a "
        "terminal and answers is not set; otherwise scripted",
    )
    answers: str | None = chz.field(
        default=None, doc="Text file with one answer per line, for policy=scripted; the last one is repeated"
    )
    checkpoint: str | None = chz.field(
        default=None,
        doc="tinker:// path of a sampler checkpoint, or a run directory (its last checkpoint); None: base "
        "model",
    )
    base_url: str | None = chz.field(
        default=None, doc="OpenAI-compatible endpoint in place of a Tinker endpoint; key: OPENAI_API_KEY"
    )

    @property
    def uses_backend(self) -> bool:
        return self.kind == "model" and self.base_url is None

    @property
    def environment(self) -> EnvironmentOptions:
        """The options of the environment, with eval_split=0."""
        return environment_options(self, url=None if self.uses_backend else self.base_url or NO_SERVER)

    @property
    def kind(self) -> str:
        """The kind of policy; `auto` is resolved."""
        if self.policy != "auto":
            return self.policy
        if self.model_name:
            return "model"
        return "typed" if sys.stdin.isatty() and self.answers is None else "scripted"

    @chz.validate
    def _policy_has_what_it_needs(self) -> None:
        kind = self.kind
        require(
            self.answers is None or kind == "scripted",
            f"answers is for policy=scripted, but the policy is {kind}; remove it, or set policy=scripted",
        )
        require(kind != "model" or bool(self.model_name), "missing: model_name; policy=model needs it")
        for name in ("checkpoint", "base_url"):
            require(
                kind == "model" or getattr(self, name) is None,
                f"{name} is for policy=model, but the policy is {kind}; remove {name}, or set policy=model",
            )
        require(
            self.base_url is None or self.checkpoint is None,
            "base_url and checkpoint exclude each other; remove one of them",
        )
        require(
            self.uses_backend or not self.use_native_tool_calling,
            "use_native_tool_calling needs the chat template of a model at a Tinker endpoint; remove it",
        )


def typed(console: Console) -> Policy:
    """Return a policy that shows the new messages and reads the answer from the terminal."""
    num_known = 0  # number of messages that the user knows: those that were shown, and the last answer

    def answer(messages: Sequence[dict[str, str]]) -> str:
        nonlocal num_known
        for message in messages[num_known if num_known <= len(messages) else 0 :]:
            console.print(message_text(message["role"], message["content"]))
        num_known = len(messages) + 1
        try:
            return console.input("[bold green]answer>[/] ")
        except EOFError as error:
            raise BackendError("standard input ended before the trial ended") from error

    return AnsweringPolicy(answer)


def policies(config: TryConfig, console: Console, model_policy: Policy | None) -> PolicyFor:
    """Return a function from a task to the policy of one trial, which is `model_policy` unless it is None.

    Raises ConfigError if the file `answers` is empty or unreadable. With policy=scripted and without
    `answers`, the returned function raises ConfigError for a task without a reference answer.
    """
    if model_policy is not None:
        return lambda task: model_policy
    if config.kind == "typed":
        return lambda task: typed(console)  # one for each trial, because it remembers the messages it showed
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
async def opened(config: TryConfig, console: Console) -> AsyncGenerator[tuple[TaskSource, PolicyFor]]:
    """Open the task source, and yield it with a function that returns the policy of each task."""
    options = config.environment
    await asyncio.to_thread(check_environment, options)
    async with AsyncExitStack() as stack:
        if config.kind == "model":
            policy, chat = await model(config, stack)
        else:
            policy, chat = None, endpoint_chat()
        policy_for = policies(config, console, policy)
        source = await asyncio.to_thread(open_task_source, options, chat)
        stack.push_async_callback(close_quietly, source)
        yield source, policy_for


async def model(config: TryConfig, stack: AsyncExitStack) -> tuple[Policy, Chat]:
    """Return the policy of `policy=model` and its chat format. `stack` closes the connection."""
    if config.base_url is not None:
        connecting = connect_endpoint(
            config.base_url, config.model_name, heartbeat_timeout_s=config.heartbeat_timeout_s
        )
        endpoint = await stack.enter_async_context(connecting)
        return EndpointPolicy(endpoint), endpoint_chat()
    checkpoint = sampler_path(config.checkpoint)
    chat = await asyncio.to_thread(load_chat, config.tokenizer or config.model_name)
    server = await stack.enter_async_context(connect(config))
    limit_s = config.request_timeout_s
    async with deadline(limit_s, BackendError, f"no policy was opened in request_timeout_s={limit_s:g}"):
        return await server.open_policy(checkpoint), chat


async def run(config: TryConfig, console: Console, statuses: list[int]) -> None:
    """Run the trials and print them. Appends the exit status to `statuses`."""
    async with opened(config, console) as (source, policy_for):
        tasks = chosen_tasks([*source.train, *source.eval], config.tasks)[: config.n_tasks]
        slots = asyncio.Semaphore(1 if config.kind == "typed" else config.n_parallel_envs)
        with tempfile.TemporaryDirectory() as directory:
            trials = [(task, member) for task in tasks for member in range(config.n_samples)]
            unprinted, panels = list(range(len(trials))), dict[int, Panel]()  # panels of finished trials

            async def run_one(number: int, task: Task, member: int) -> Trajectory | TrialFailure:
                async with slots:
                    create = partial(
                        source.trial,
                        task,
                        directory=Path(directory),
                        seed=config.seed + member,
                        temperature=config.temperature,
                        member=member,
                    )
                    result = await run_trial(create, policy_for(task), task, timeout_s=config.trial_timeout_s)
                panels[number] = trial_panel(task, member, result, with_messages=config.kind != "typed")
                while unprinted and unprinted[0] in panels:
                    console.print(panels.pop(unprinted.pop(0)))
                return result

            notice = WaitNotice(console.print)
            if config.uses_backend:
                notice.start("the first trial", explanation=MAY_COMPILE, is_over=lambda: 0 not in unprinted)
            results = await asyncio.gather(*(run_one(number, *trial) for number, trial in enumerate(trials)))
    groups = [
        TrajectoryGroup(
            task=task,
            trajectories=[member for member in members if isinstance(member, Trajectory)],
            failures=[member for member in members if isinstance(member, TrialFailure)],
        )
        for task, members in zip(tasks, batched(results, config.n_samples), strict=True)
    ]
    for content in summary(groups, config):
        console.print(content)
    is_working = any(
        trajectory.zero_reason is not ZeroReason.ENV_ERROR
        for group in groups
        for trajectory in group.trajectories
    )
    statuses.append(0 if is_working else 1)


def trial_panel(task: Task, member: int, result: Trajectory | TrialFailure, *, with_messages: bool) -> Panel:
    """Return a panel with the reward of a trial, or the reason why it was not graded. With `with_messages`,
    the panel of a graded trial also contains the conversation."""
    title = f"{task.id}, trial {member + 1}"
    if isinstance(result, TrialFailure):
        return Panel(
            Text(printable(f"{result.kind}: {result.message}"), "red"),
            title=Text(f"{title}: not graded"),
            title_align="left",
        )
    messages = result.conversation if with_messages else ()
    lines = [message_text(str(message.get("role")), str(message.get("content"))) for message in messages]
    if result.zero_reason is not None:
        lines.append(Text(printable(f"{result.zero_reason}: {result.zero_detail}"), "red"))
    metrics = ", ".join(
        f"{name} {value:g}" for name, value in result.metrics.items() if name != "duration_s" and value
    )
    end = f"turns: {len(result.turns)}, ended by {result.stop_reason}{f'; {metrics}' if metrics else ''}"
    return Panel(
        Group(*lines, Text(end, "dim")), title=Text(f"{title}: reward {result.reward:g}"), title_align="left"
    )


def summary(groups: Sequence[TrajectoryGroup], config: TryConfig) -> list[Table | Text]:
    """Return a table with one row per task, and a line with the pass rate of all graded trials.

    With policy=model and several trials per task, a further line has the number of tasks whose trials have
    different rewards.
    """
    table = Table(box=None, padding=(0, 1))
    for heading in ("task", "solved", "rewards", "not graded"):
        table.add_column(heading, no_wrap=heading == "task")
    for group in groups:
        solved = sum(reward >= SOLVED for reward in group.rewards)
        rewards = " ".join(f"{reward:g}" for reward in group.rewards)
        table.add_row(
            Text(group.task.id), f"{solved}/{len(group.rewards)}", rewards, str(len(group.failures) or "")
        )
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        return [table, Text("no trial could be graded", "red")]
    num_solved, num_trials = sum(reward >= SOLVED for reward in rewards), len(rewards)
    lines = [] if set(rewards) <= {0, 1} else [f"mean reward: {sum(rewards) / num_trials:.3f}"]
    rate = f"{num_solved / num_trials:.1%} ({num_solved}/{num_trials} trials)"
    lines.append(f"pass rate ({config.kind}): {rate}")
    if config.kind == "model" and config.n_samples > 1:
        num_mixed = sum(len(set(group.rewards)) > 1 for group in groups)
        lines.append(
            f"tasks whose trials have different rewards, from which GRPO learns: {num_mixed} of {len(groups)}"
        )
    return [table, *map(Text, lines)]


def main(argv: Sequence[str]) -> int:
    """Run the trials and return the exit status."""
    return run_program(argv, _run, lambda words: help_for(TryConfig, title=TITLE, words=words))


def _run(argv: Sequence[str]) -> int:
    statuses, console = list[int](), terminal()
    with exit_on_signal():
        typed = with_present_names(with_config_files(argv), list(chz.chz_fields(TryConfig)))
        load_environment(typed)
        load_environment(argv := with_backend(typed))  # reads .env.skyrl-tx if this line adds the backend
        argv = asyncio.run(with_local_server(with_locations_from_environment(argv), typed))
        config = parse_as(TryConfig, argv := with_served_model(argv))
        if config.uses_backend:
            config = fitted_to_server(config, argv, config.lengths_to_fit)
        status = asyncio.run(run_until_signal(run(config, console, statuses), console.print))
        return status or statuses[0]


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
