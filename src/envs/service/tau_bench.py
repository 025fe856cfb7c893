"""env=tau_bench: the domain toy_retail, the domains of tau2-bench, and service domains of your own.

environment_kwargs=domain=toy_retail             the built-in domain, which needs no download
environment_kwargs=domain=retail+airline,user_simulator=openai,user_model=m,user_base_url=http://h:8000/v1
environment_kwargs=domain=my_package:open_clinic a domain of your own (docs/environments.md)
train_data=a.jsonl,b.parquet                     tasks from files; each row names its domain
test_data=retail:test,shop=c.jsonl               a split of a domain, and a file whose held-out set is
                                                 called shop in the metrics
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path

import chz

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import TaskSource
from src.envs.episodes import TASK_FILES, EnvSpec, episodes, split
from src.envs.message_env import MessageEnv
from src.envs.options import EnvironmentOptions
from src.envs.service import tau2, toy_retail
from src.envs.service.domains import (
    TEST,
    TRAIN,
    DomainContext,
    ServiceDomain,
    open_domain,
    registered_domains,
    tool_domain,
)
from src.envs.service.service_env import ServiceEnv, do_nothing
from src.envs.service.subprocess_pool import WorkerPool
from src.envs.service.task_files import DomainProvider, TaskDefinition, read_selection, require_disjoint
from src.envs.service.user_simulator import (
    EndpointUserModel,
    ModelUserSimulator,
    TinkerUserModel,
    Tools,
    UserModel,
    UserSimulator,
)
from src.policy.chat import Chat, load_chat
from src.policy.openai_client import ChatEndpoint, open_endpoint

logger = logging.getLogger(__name__)

NUM_WORKERS = 4
STEP_TIMEOUT_S = 60.0
# Domain -> the split to train on and the split to hold out.
SPLITS: dict[str, tuple[str, str | None]] = {toy_retail.NAME: ("train", "test"), **tau2.SPLITS}
# Former name of an option -> its current name. Former names are accepted for one release.
RENAMED_OPTIONS = {
    "customer": "user_simulator",
    "customer_model": "user_model",
    "customer_base_url": "user_base_url",
    "customer_temperature": "user_temperature",
}

Options = dict[str, str]  # each function removes the options that it reads; the rest is rejected


def check_tau_bench(config: EnvironmentOptions) -> None:
    """Raise ConfigError if `environment_kwargs` names an unknown domain, or a domain of tau2-bench without
    `tau2_home`. With toy_retail alone, raise the errors of `open_tau_bench`. Other domains are only opened by
    `open_tau_bench`, because they need workers of tau2-bench or run code of the user. With
    user_simulator=tinker, toy_retail is not opened either, because a tokenizer may need a running server."""
    for old, new in RENAMED_OPTIONS.items():
        if old in config.environment_options:
            logger.warning("environment_kwargs: %s is a former name; use %s", old, new)
    options = _options_of(config)
    chosen = _domain_names(config, options)
    names = {name for name in chosen if ":" not in name}
    registered = registered_domains()
    _require_known(names, [*SPLITS, *registered], where="environment_kwargs")
    if benchmark := sorted((names & tau2.SPLITS.keys()) - registered.keys()):
        _tau2_home(config, "+".join(benchmark))
    has_files = bool(config.train_data or config.test_data)
    if chosen == [toy_retail.NAME] and not has_files and options.get("user_simulator") != "tinker":
        split(_spec(config), config)


def open_tau_bench(config: EnvironmentOptions, chat: Chat) -> TaskSource:
    """Open the named domains and the task files. Raises ConfigError for unknown domains, tasks or options."""
    return episodes(config, chat, _spec(config))


def _options_of(config: EnvironmentOptions) -> Options:
    """Return the settings of `environment_kwargs` under their current names."""
    settings = config.environment_options
    return {RENAMED_OPTIONS.get(name, name): value for name, value in settings.items()}


def _spec(config: EnvironmentOptions) -> EnvSpec:
    options = _options_of(config)
    names = _domain_names(config, options)
    model = open_user_model(config, options)
    context = DomainContext(options=options, user_model=model)
    registered = registered_domains()
    opened = {name: open_domain(name, context) for name in names if ":" in name or name in registered}
    names = [opened[name].name if name in opened else name for name in names]
    own_domains = {domain.name: domain for domain in opened.values()}
    known_domains = [*SPLITS, *{**own_domains, **registered}]
    training = [read_selection(text, known_domains) for text in config.train_data or ()]
    held_out = [read_selection(text, known_domains, may_be_named=True) for text in config.test_data or ()]
    domains = set(names).union(*(selection.domains for selection in (*training, *held_out)))
    _require_known(domains - set(names), known_domains, where="train_data or test_data")
    _require_known(set(names), known_domains, where="environment_kwargs")
    for name in sorted(domains & registered.keys() - own_domains.keys()):
        own_domains[name] = open_domain(name, context)
    judge = (
        open_endpoint(config.judge_base_url, config.judge_model)
        if config.judge_base_url and config.judge_model
        else None
    )
    providers = open_domains(config, domains, options, model, judge)
    providers |= {name: provider_of(domain) for name, domain in own_domains.items()}
    splits = SPLITS | {
        name: (TRAIN, TEST if TEST in domain.splits else None) for name, domain in own_domains.items()
    }
    if options:
        option = next(iter(options))
        raise ConfigError(
            f"environment_kwargs: domain={'+'.join(sorted(domains))} has no option {option}; remove it"
        )
    tasks = [task for name in names for task in providers[name].official(name, splits[name][0])]
    tasks += [task for selection in training for task in selection.tasks(providers)]
    if held_out:
        tests = [task for selection in held_out for task in selection.tasks(providers)]
    else:
        tests = [
            task
            for name in names
            if (split := splits[name][1]) is not None
            for task in providers[name].official(name, split)
        ]
    require_disjoint(tasks, tests)

    async def close() -> None:
        for close in {
            *(provider.close for provider in providers.values()),
            *(resource.close for resource in (model, judge) if resource is not None),
        }:
            await close()

    def make(task: Task, seed: int) -> MessageEnv:
        return providers[str(task.row["domain"])].make(task, seed)

    return EnvSpec(
        tasks=tau2.gradable_tasks(tasks, has_judge=judge is not None),
        held_out=tau2.gradable_tasks(tests, has_judge=judge is not None),
        make=make,
        noop_reward=do_nothing,
        reads=TASK_FILES,
        close=close,
    )


def provider_of(domain: ServiceDomain) -> DomainProvider:
    """Return the provider of toy_retail or of a domain of your own."""

    def completed(task: Task) -> Task:
        return replace(task, domain=task.domain or domain.name, row={**task.row, "domain": domain.name})

    def official(name: str, split: str | None) -> list[Task]:
        if split is not None and split not in domain.splits:
            raise ConfigError(f"{name} has no split {split}; its splits are {' and '.join(domain.splits)}")
        chosen = domain.splits.values() if split is None else [domain.splits[split]]
        return [completed(task) for tasks in chosen for task in tasks]

    def defined(name: str, definitions: Mapping[str, TaskDefinition]) -> list[Task]:
        if domain.defined is None:
            raise ConfigError(f"{name}: rows cannot define tasks of this domain; give ids of its tasks")
        return [completed(domain.defined(task_id, row)) for task_id, row in definitions.items()]

    return DomainProvider(
        official=official,
        defined=defined,
        make=lambda task, seed: ServiceEnv(domain.episode(task, seed)),
        close=domain.close,
    )


def open_domains(
    config: EnvironmentOptions,
    domains: set[str],
    options: Options,
    model: UserModel | None,
    judge: ChatEndpoint | None,
) -> dict[str, DomainProvider]:
    """Return the providers of the built-in domains in `domains`: toy_retail and the domains of tau2-bench."""
    if config.tasks_dir is not None and toy_retail.NAME not in domains:
        names = "+".join(sorted(domains))
        raise ConfigError(
            f"tasks_dir cannot be used with domain={names}: only toy_retail reads it; remove tasks_dir"
        )
    providers: dict[str, DomainProvider] = {}
    if toy_retail.NAME in domains:
        providers[toy_retail.NAME] = open_toy_retail(config, model)
    if benchmark := sorted(domains & tau2.SPLITS.keys()):
        provider = open_tau2(config, options, model, judge, names="+".join(benchmark))
        providers |= dict.fromkeys(benchmark, provider)
    return providers


def open_toy_retail(config: EnvironmentOptions, model: UserModel | None) -> DomainProvider:
    directory = Path(config.tasks_dir).expanduser() if config.tasks_dir else toy_retail.DIRECTORY
    shop = toy_retail.read_shop(directory)
    domain = tool_domain(
        name=toy_retail.NAME,
        database=shop.database,
        policy=shop.policy,
        tools=list(toy_retail.TOOLS.values()),
        rows=shop.rows,
        path=directory / "tasks.json",
        context=DomainContext(options={}, user_model=model),
        user_instructions=toy_retail.INSTRUCTIONS,
        id_prefix="",
    )
    return provider_of(domain)


def open_tau2(
    config: EnvironmentOptions,
    options: Options,
    model: UserModel | None,
    judge: ChatEndpoint | None,
    *,
    names: str,
) -> DomainProvider:
    """Open domains of tau2-bench."""
    home = _tau2_home(config, names)
    grading: tau2.Grading = one_of(options, "grading", tau2.GRADINGS)
    workers = tau2.worker_settings(
        home,
        num_workers=number(options, "workers", NUM_WORKERS),
        step_timeout_s=number(options, "step_timeout_s", STEP_TIMEOUT_S),
    )
    is_parallel = one_of(options, "parallel_tool_calls", ("false", "true")) == "true"
    pool = WorkerPool(workers)
    make_user = tau2.scripted_user if model is None else partial(_model_user, model)
    context = tau2.Tau2Context(pool=pool, make_user=make_user, grading=grading, judge=judge)
    return DomainProvider(
        official=lambda domain, split: tau2.with_grading(
            grading, tau2.official_tasks(workers, domain, split)
        ),
        defined=lambda domain, definitions: tau2.with_grading(
            grading, tau2.defined_tasks(workers, domain, definitions)
        ),
        make=lambda task, seed: ServiceEnv(
            tau2.Tau2Episode(task, seed, context), parallel_tool_calls=is_parallel
        ),
        close=pool.aclose,
    )


def _domain_names(config: EnvironmentOptions, options: Options) -> list[str]:
    """Remove `domain` from the options and return the domains that it names."""
    default = "" if config.train_data or config.test_data else toy_retail.NAME
    return [name for name in options.pop("domain", default).split("+") if name]


def _require_known(names: set[str], known: Sequence[str], *, where: str) -> None:
    if unknown := sorted(names - set(known)):
        raise ConfigError(
            f"{where}: domain={unknown[0]} is not one of {', '.join(known)}; choose one, or give "
            "your own as environment_kwargs=domain=module:function"
        )


def _tau2_home(config: EnvironmentOptions, names: str) -> Path:
    if config.tau2_home is None:
        raise ConfigError(
            f"domain={names} needs tau2-bench: run scripts/setup_tau.sh, and set TAU2_HOME or tau2_home"
        )
    return Path(config.tau2_home).expanduser()


def _model_user(model: UserModel, instructions: str, tools: Tools, seed: int) -> UserSimulator:
    return ModelUserSimulator(model, instructions, seed=seed, tools=tools)


def open_user_model(config: EnvironmentOptions, options: Options) -> UserModel | None:
    """Open the model that the options `user_*` name. Return None for scripted user simulators."""
    kind = one_of(options, "user_simulator", ("scripted", "openai", "tinker"))
    if kind == "scripted":
        return None
    temperature = number(options, "user_temperature", 0.0)
    name = options.pop("user_model", None)
    if kind == "openai":
        base_url = options.pop("user_base_url", None)
        if name is None or base_url is None:
            raise ConfigError(
                "environment_kwargs user_simulator=openai needs user_model=NAME and "
                "user_base_url=http://host:port/v1"
            )
        return EndpointUserModel(open_endpoint(base_url, name), temperature=temperature)
    is_checkpoint = name is not None and name.startswith("tinker://")
    base_model = config.model_name if is_checkpoint or name is None else name
    chat = load_chat((config.tokenizer if base_model == config.model_name else None) or base_model)
    settings = chz.replace(config, model_name=base_model)
    return TinkerUserModel(settings, name if is_checkpoint else None, chat, temperature=temperature)


def one_of[Choice: str](options: Options, name: str, choices: tuple[Choice, ...]) -> Choice:
    """Remove an option and return its value. The default is the first choice.

    Raises ConfigError if the value is not one of `choices`.
    """
    text = options.pop(name, choices[0])
    choice = next((choice for choice in choices if choice == text), None)
    if choice is None:
        raise ConfigError(f"environment_kwargs: {name}={text} is not one of {', '.join(choices)}; choose one")
    return choice


def number[Number: (int, float)](options: Options, name: str, default: Number) -> Number:
    """Remove an option and return its value, which has the type of the default.

    The value must be above 0, or at least 0 if the default is 0. Raises ConfigError for any other value.
    """
    text, number_type = options.pop(name, str(default)), type(default)
    try:
        value = number_type(text)
    except ValueError:
        value = number_type(-1)
    if not isfinite(value) or value < 0 or (value == 0 and default > 0):
        kind = "an integer" if number_type is int else "a number"
        bound = f"{kind} above 0" if default > 0 else f"{kind} of at least 0"
        raise ConfigError(f"environment_kwargs {name} must be {bound}, not {text!r}")
    return value
