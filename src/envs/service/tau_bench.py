"""env=tau_bench: service domains graded as tau2-bench grades them, by name.

environment_kwargs=domain=toy_retail                                      our own, no download
environment_kwargs=domain=retail+airline,customer=openai,customer_model=m,customer_base_url=http://127.0.0.1:8000/v1
train_data=a.jsonl,b.parquet test_data=retail:test,shop=c.jsonl           tasks of files and splits; their domains are found in them
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chz

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.episodes import EnvSpec, episodes
from src.envs.message_env import MessageEnv
from src.envs.options import EnvironmentSettings
from src.envs.service import tau2, toy_retail
from src.envs.service.domain import ServiceEnv, do_nothing
from src.envs.service.subprocess_pool import WorkerPool
from src.envs.service.task_files import Definition
from src.envs.service.task_sources import read_source, require_disjoint
from src.envs.service.user_simulator import Customer, EndpointModel, Model, ModelCustomer, TinkerModel, Tools
from src.policy.chat import Chat, load_chat
from src.policy.openai_client import ChatEndpoint, open_endpoint

NUM_WORKERS = 4
STEP_TIMEOUT_S = 60.0
SPLITS: dict[str, tuple[str, str | None]] = {
    toy_retail.NAME: ("train", "test"),
    **tau2.SPLITS,
}  # what is trained on, and held out

Options = dict[str, str]  # a domain takes out what it honours; what is left over is refused


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainProvider:
    """What knows and plays the tasks of some domains. Implements `KnownTasks`."""

    official: Callable[[str, str | None], list[Task]]
    defined: Callable[[str, Mapping[str, Definition]], list[Task]]
    make: Callable[[Task, int], MessageEnv]
    close: Callable[[], Awaitable[None]]


def open_tau_bench(config: EnvironmentSettings, chat: Chat) -> TaskSource:
    """The tasks of the named domains and of the files, each played by its own domain. ConfigError for what there is not."""
    options = config.environment_options
    trained = [read_source(text, SPLITS) for text in config.train_data or ()]
    held_out = [read_source(text, SPLITS, may_be_named=True) for text in config.test_data or ()]
    name = options.pop("domain", "" if trained or held_out else toy_retail.NAME)
    names = name.split("+") if name else []
    domains = {*names, *(domain for source in (*trained, *held_out) for domain in source.domains)}
    if unknown := sorted(domains - SPLITS.keys()):
        where = "environment_kwargs" if unknown[0] in names else "train_data or test_data:"
        raise ConfigError(f"{where} domain={unknown[0]} is none of {', '.join(SPLITS)}")
    model = customer_model(config, options)
    judge = (
        open_endpoint(config.judge_base_url, config.judge_model)
        if config.judge_base_url and config.judge_model
        else None
    )
    kinds = open_kinds(config, domains, options, model, judge)
    if options:
        raise ConfigError(
            f"environment_kwargs: domain={'+'.join(sorted(domains))} has no option {next(iter(options))}; drop it"
        )
    tasks = [task for name in names for task in kinds[name].official(name, SPLITS[name][0])]
    tasks += [task for source in trained for task in source.tasks(kinds)]
    if held_out:
        tests = [task for source in held_out for task in source.tasks(kinds)]
    else:
        tests = [
            task
            for name in names
            if (split := SPLITS[name][1]) is not None
            for task in kinds[name].official(name, split)
        ]
    require_disjoint(tasks, tests)

    async def close() -> None:
        for close in {
            *(kind.close for kind in kinds.values()),
            *(resource.close for resource in (model, judge) if resource is not None),
        }:
            await close()

    def make(task: Task, seed: int) -> MessageEnv:
        return kinds[str(task.row["domain"])].make(task, seed)

    has_judge = judge is not None
    gradable = [tau2.gradable(found, has_judge=has_judge) for found in (tasks, tests)]
    return episodes(
        config,
        chat,
        EnvSpec(tasks=gradable[0], held_out=gradable[1], make=make, do_nothing=do_nothing, close=close),
    )


def open_kinds(
    config: EnvironmentSettings,
    domains: set[str],
    options: Options,
    model: Model | None,
    judge: ChatEndpoint | None,
) -> dict[str, DomainProvider]:
    """Domain -> what knows and plays it."""
    kinds: dict[str, DomainProvider] = {}
    if toy_retail.NAME in domains:
        kinds[toy_retail.NAME] = open_toy_retail(config, model)
    if benchmark := sorted(domains & tau2.SPLITS.keys()):
        kinds |= dict.fromkeys(benchmark, open_tau2(config, options, model, judge, names="+".join(benchmark)))
    return kinds


def open_toy_retail(config: EnvironmentSettings, model: Model | None) -> DomainProvider:
    customer = toy_retail.scripted if model is None else toy_retail.played_by(model)
    folder = Path(config.tasks_dir).expanduser() if config.tasks_dir else toy_retail.FOLDER
    shop = toy_retail.read_shop(folder)
    domain = shop.domain(customer)
    splits = {"train": domain.tasks, "test": domain.held_out, None: [*domain.tasks, *domain.held_out]}

    def official(name: str, split: str | None) -> list[Task]:
        if split not in splits:
            raise ConfigError(f"{name} has no split {split}; it has train and test")
        return [
            replace(task, row={**task.row, "domain": name}, gold_writes=writes(task.row["actions"]))
            for task in splits[split]
        ]

    def defined(name: str, definitions: Mapping[str, Definition]) -> list[Task]:
        tasks, path = list[Task](), folder / "tasks.json"
        for task_id, one in definitions.items():
            scripted = {"scripts": [[one.instruction]], "actions": one.actions, "communicate": one.facts}
            row = {"id": task_id, "domain": name, "instruction": one.instruction, **scripted}
            try:
                toy_retail.after_gold(shop.database, row)
            except toy_retail.ToolError as error:
                raise ConfigError(f"{name}: {task_id}: a gold action fails: {error}") from error
            tasks.append(
                Task(
                    id=task_id,
                    path=path,
                    instruction=one.instruction,
                    domain=name,
                    row=row,
                    gold_writes=writes(one.actions),
                )
            )
        return tasks

    def writes(actions: Any) -> bool:
        return any(toy_retail.TOOLS[action["name"]].writes for action in actions)

    async def close() -> None:
        """Its episodes share nothing."""

    return DomainProvider(official=official, defined=defined, make=domain.make, close=close)


def open_tau2(
    config: EnvironmentSettings,
    options: Options,
    model: Model | None,
    judge: ChatEndpoint | None,
    *,
    names: str,
) -> DomainProvider:
    """The benchmark's own domains."""
    if config.tasks_dir is not None:
        raise ConfigError(
            f"tasks_dir is not for domain={names}, whose tasks are the benchmark's own or train_data's; drop it"
        )
    if config.tau2_home is None:
        raise ConfigError(
            f"domain={names} needs the benchmark itself: run scripts/setup_tau.sh, and set TAU2_HOME or tau2_home"
        )
    grading: tau2.Grading = one_of(options, "grading", tau2.GRADINGS)
    workers = tau2.worker_settings(
        Path(config.tau2_home).expanduser(),
        num_workers=int(number(options, "workers", NUM_WORKERS)),
        step_timeout_s=number(options, "step_timeout_s", STEP_TIMEOUT_S),
    )
    is_parallel = one_of(options, "parallel_tool_calls", ("false", "true")) == "true"
    pool = WorkerPool(workers)
    parts = tau2.Tau2Parts(pool=pool, make_customer=tau2_customers(model), grading=grading, judge=judge)
    return DomainProvider(
        official=lambda domain, split: tau2.graded_by(grading, tau2.official_tasks(workers, domain, split)),
        defined=lambda domain, definitions: tau2.graded_by(
            grading, tau2.defined_tasks(workers, domain, definitions)
        ),
        make=lambda task, seed: ServiceEnv(
            tau2.Tau2Episode(task, seed, parts), parallel_tool_calls=is_parallel
        ),
        close=pool.close,
    )


def tau2_customers(model: Model | None) -> tau2.MakeCustomer:
    if model is None:
        return tau2.scripted_customer

    def played(instructions: str, tools: Tools, seed: int) -> Customer:
        return ModelCustomer(model, instructions, seed=seed, tools=tools)

    return played


def customer_model(config: EnvironmentSettings, options: Options) -> Model | None:
    """What plays the customers, by the options customer, customer_model, customer_base_url and customer_temperature; None: a script."""
    kind = one_of(options, "customer", ("scripted", "openai", "tinker"))
    if kind == "scripted":
        return None
    temperature = number(options, "customer_temperature", 0.0)
    name = options.pop("customer_model", None)
    if kind == "openai":
        base_url = options.pop("customer_base_url", None)
        if name is None or base_url is None:
            raise ConfigError(
                "environment_kwargs customer=openai needs customer_model=NAME and customer_base_url=http://host:port/v1"
            )
        return EndpointModel(open_endpoint(base_url, name), temperature=temperature)
    is_checkpoint = name is not None and name.startswith("tinker://")
    base_model = config.model_name if is_checkpoint or name is None else name
    chat = load_chat((config.tokenizer if base_model == config.model_name else None) or base_model)
    settings = chz.replace(config, model_name=base_model, load_checkpoint_path=None)
    return TinkerModel(settings, name if is_checkpoint else None, chat, temperature=temperature)


def one_of[Choice: str](options: Options, name: str, choices: tuple[Choice, ...]) -> Choice:
    """The option's value, the first choice where it is not given. ConfigError for any other."""
    text = options.pop(name, choices[0])
    found = next((choice for choice in choices if choice == text), None)
    if found is None:
        raise ConfigError(f"environment_kwargs {name}={text} is none of {', '.join(choices)}")
    return found


def number(options: Options, name: str, default: float) -> float:
    """The option's value, which has to be a number above 0, or 0 where that is the default."""
    text = options.pop(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0 or (value == 0 and default > 0):
        raise ConfigError(f"environment_kwargs {name} needs a number above 0, not {text!r}")
    return value
