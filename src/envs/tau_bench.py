"""env=tau_bench: service domains graded as tau2-bench grades them, by name.

environment_kwargs=domain=toy_retail                                      our own, no download
environment_kwargs=domain=retail+airline,customer=openai,customer_model=m,customer_base_url=http://127.0.0.1:8000/v1
train_data=a.jsonl,b.parquet test_data=retail:test,shop=c.jsonl           tasks of files and splits; their domains are found in them
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from src.backend import BackendSettings
from src.chat import Chat, load_chat
from src.config import TrainerConfig, narrow, pairs
from src.endpoint import ChatEndpoint, open_endpoint
from src.envs import tau2, toy_retail
from src.envs.base import TaskSource
from src.envs.customers import Customer, EndpointModel, Model, ModelCustomer, TinkerModel, Tools
from src.envs.episodes import Domain, episodes
from src.envs.service import ServiceEnv, do_nothing
from src.envs.task_rows import Definition, Row, read_rows, tasks_of
from src.envs.workers import WorkerPool
from src.errors import ConfigError
from src.generator import MessageEnv
from src.trajectory import Task

NUM_WORKERS = 4
STEP_TIMEOUT_S = 60.0
SPLITS: dict[str, tuple[str, str | None]] = {toy_retail.NAME: ("train", "test"), **tau2.SPLITS}  # what is trained on, and held out

Options = dict[str, str]  # a domain takes out what it honours; what is left over is refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What knows and plays the tasks of some domains. Implements `KnowsTasks`."""

    official: Callable[[str, str | None], list[Task]]
    defined: Callable[[str, Mapping[str, Definition]], list[Task]]
    make: Callable[[Task, int], MessageEnv]
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Tasks that an option names: rows of a file, or a split of a domain as retail:test."""

    path: Path
    split: str | None = None  # None: rows
    rows: Sequence[Row] = ()
    name: str = ""  # whose metrics they belong to, for held-out ones; without one, each task's own domain

    @property
    def domains(self) -> set[str]:
        return {row.domain for row in self.rows} if self.split is None else {str(self.path)}


def open_tau_bench(config: TrainerConfig, chat: Chat) -> TaskSource:
    """The tasks of the named domains and of the files, each played by its own domain. ConfigError for what there is not."""
    options = pairs(config.environment_kwargs, option="environment_kwargs")
    trained = [source_of(text) for text in config.train_data or ()]
    held_out = [source_of(text, may_be_named=True) for text in config.test_data or ()]
    name = options.pop("domain", "" if trained or held_out else toy_retail.NAME)
    names = name.split("+") if name else []
    domains = {*names, *(domain for source in (*trained, *held_out) for domain in source.domains)}
    if unknown := sorted(domains - SPLITS.keys()):
        where = "environment_kwargs" if unknown[0] in names else "train_data or test_data:"
        raise ConfigError(f"{where} domain={unknown[0]} is none of {', '.join(SPLITS)}")
    is_official = domains & tau2.SPLITS.keys()
    grading: tau2.Grading = one_of(options, "grading", tau2.GRADINGS) if is_official else "all"
    model = customer_model(config, options)
    judge = open_endpoint(config.judge_base_url, config.judge_model) if config.judge_base_url and config.judge_model else None
    kinds: dict[str, Kind] = {}
    if toy_retail.NAME in domains:
        kinds[toy_retail.NAME] = open_toy_retail(config, model)
    if is_official:
        kinds |= dict.fromkeys(sorted(is_official), open_tau2(config, options, model, judge, grading, names="+".join(sorted(is_official))))
    if options:
        raise ConfigError(f"environment_kwargs: domain={name or '+'.join(sorted(domains))} has no option {next(iter(options))}; drop it")
    official = [(name, SPLITS[name]) for name in names]
    tasks = [task for name, (split, _) in official for task in kinds[name].official(name, split)]
    tasks += [task for source in trained for task in found_in(source, kinds)]
    tests = [task for source in held_out for task in found_in(source, kinds)]
    if not held_out:
        tests = [task for name, (_, split) in official if split is not None for task in kinds[name].official(name, split)]
    require_disjoint(tasks, tests)

    def gradable(tasks: Sequence[Task]) -> list[Task]:
        kept = tau2.gradable(tasks, grading=grading, has_judge=judge is not None)
        return [replace(task, grading="" if grading == "all" else grading) for task in kept]

    async def close() -> None:
        for close in {*(kind.close for kind in kinds.values()), *(resource.close for resource in (model, judge) if resource is not None)}:
            await close()

    def make(task: Task, seed: int) -> MessageEnv:
        return kinds[str(task.row["domain"])].make(task, seed)

    domain = Domain(tasks=gradable(tasks), held_out=gradable(tests), make=make, do_nothing=do_nothing, close=close)
    return episodes(config, chat, domain)


def source_of(text: str, *, may_be_named: bool = False) -> Source:
    """`[NAME=]FILE` or `[NAME=]DOMAIN:SPLIT`.

    >>> source_of("shop=retail:test", may_be_named=True)
    Source(path=PosixPath('retail'), split='test', rows=(), name='shop')
    """
    name, _, place = text.rpartition("=") if may_be_named else ("", "", text)
    domain, _, split = place.partition(":")
    if domain in SPLITS and split:
        return Source(path=Path(domain), split=split, name=name)
    path = Path(place).expanduser()
    return Source(path=path, rows=read_rows(path), name=name)


def found_in(source: Source, kinds: Mapping[str, Kind]) -> list[Task]:
    if source.split is None:
        tasks = tasks_of(source.rows, kinds, path=source.path)
    else:
        tasks = kinds[str(source.path)].official(str(source.path), source.split)
    return [replace(task, domain=source.name) for task in tasks] if source.name else tasks


def require_disjoint(tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """ConfigError where a task, by its domain and its id there, is in both."""
    trained = {task.id for task in tasks}
    if both := [task.id for task in held_out if task.id in trained]:
        more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
        raise ConfigError(f"held-out tasks are trained on: {both[0]}{more}; leave them out of train_data or of test_data")


def open_toy_retail(config: TrainerConfig, model: Model | None) -> Kind:
    customer = toy_retail.scripted if model is None else toy_retail.played_by(model)
    folder = Path(config.tasks_dir).expanduser() if config.tasks_dir else toy_retail.FOLDER
    domain = toy_retail.load_domain(folder, customer=customer)
    database = json.loads((folder / "db.json").read_text())
    splits = {"train": domain.tasks, "test": domain.held_out, None: [*domain.tasks, *domain.held_out]}

    def official(name: str, split: str | None) -> list[Task]:
        if split not in splits:
            raise ConfigError(f"{name} has no split {split}; it has train and test")
        return [replace(task, row={**task.row, "domain": name}, gold_writes=writes(task.row["actions"])) for task in splits[split]]

    def defined(name: str, definitions: Mapping[str, Definition]) -> list[Task]:
        tasks: list[Task] = []
        for task_id, one in definitions.items():
            scripted = {"scripts": [[one.instruction]], "actions": one.actions, "communicate": one.facts}
            row = {"id": task_id, "domain": name, "instruction": one.instruction, **scripted}
            try:
                toy_retail.after_gold(database, row)
            except toy_retail.ToolError as error:
                raise ConfigError(f"{name}: {task_id}: a gold action fails: {error}") from error
            tasks.append(Task(id=task_id, path=folder, instruction=one.instruction, domain=name, row=row, gold_writes=writes(one.actions)))
        return tasks

    def writes(actions: Any) -> bool:
        return any(toy_retail.TOOLS[action["name"]].writes for action in actions)

    async def close() -> None:
        """Its episodes share nothing."""

    return Kind(official=official, defined=defined, make=domain.make, close=close)


def open_tau2(
    config: TrainerConfig, options: Options, model: Model | None, judge: ChatEndpoint | None, grading: tau2.Grading, *, names: str
) -> Kind:
    """The benchmark's own domains."""
    if config.tasks_dir is not None:
        raise ConfigError(f"tasks_dir is not for domain={names}, whose tasks are the benchmark's own or train_data's; drop it")
    if config.tau2_home is None:
        raise ConfigError(f"domain={names} needs the benchmark itself: run scripts/setup_tau.sh, and set TAU2_HOME or tau2_home")
    workers = tau2.worker_settings(
        Path(config.tau2_home).expanduser(),
        num_workers=int(number(options, "workers", NUM_WORKERS)),
        step_timeout_s=number(options, "step_timeout_s", STEP_TIMEOUT_S),
    )
    is_parallel = one_of(options, "parallel_tool_calls", ("false", "true")) == "true"
    pool = WorkerPool(workers)
    parts = tau2.Tau2Parts(pool=pool, make_customer=tau2_customers(model), grading=grading, judge=judge)
    return Kind(
        official=partial(tau2.official_tasks, workers),
        defined=partial(tau2.defined_tasks, workers),
        make=lambda task, seed: ServiceEnv(tau2.Tau2Episode(task, seed, parts), parallel_tool_calls=is_parallel),
        close=pool.close,
    )


def tau2_customers(model: Model | None) -> tau2.MakeCustomer:
    if model is None:
        return tau2.scripted_customer

    def played(instructions: str, tools: Tools, seed: int) -> Customer:
        return ModelCustomer(model, instructions, seed=seed, tools=tools)

    return played


def customer_model(config: TrainerConfig, options: Options) -> Model | None:
    """What plays the customers, by the options customer, customer_model, customer_base_url and customer_temperature; None: a script."""
    kind = one_of(options, "customer", ("scripted", "openai", "tinker"))
    if kind == "scripted":
        return None
    temperature = number(options, "customer_temperature", 0.0)
    name = options.pop("customer_model", None)
    if kind == "openai":
        base_url = options.pop("customer_base_url", None)
        if name is None or base_url is None:
            raise ConfigError("environment_kwargs customer=openai needs customer_model=NAME and customer_base_url=http://host:port/v1")
        return EndpointModel(open_endpoint(base_url, name), temperature=temperature)
    is_checkpoint = name is not None and name.startswith("tinker://")
    base_model = config.model_name if is_checkpoint or name is None else name
    chat = load_chat((config.tokenizer if base_model == config.model_name else None) or base_model)
    settings = replace(narrow(config, BackendSettings), model_name=base_model, load_checkpoint_path=None)
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
