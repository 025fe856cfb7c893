"""env=tau_bench: service domains graded as tau2-bench grades them, by name.

environment_kwargs=domain=toy_retail                                      our own, no download
environment_kwargs=domain=retail+airline,customer=openai,customer_model=m,customer_base_url=http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from src.backend import BackendSettings
from src.chat import Chat, load_chat
from src.config import TrainerConfig, narrow, pairs
from src.endpoint import open_endpoint
from src.envs import tau2, toy_retail
from src.envs.base import TaskSource
from src.envs.customers import Customer, EndpointModel, Model, ModelCustomer, TinkerModel, Tools
from src.envs.episodes import Domain, episodes
from src.envs.service import ServiceEnv
from src.envs.workers import WorkerPool
from src.errors import ConfigError
from src.trajectory import Task

NUM_WORKERS = 4
STEP_TIMEOUT_S = 60.0

Options = dict[str, str]  # a domain takes out what it honours; what is left over is refused


def open_tau_bench(config: TrainerConfig, chat: Chat) -> TaskSource:
    """ConfigError for a domain or an option that there is not."""
    options = pairs(config.environment_kwargs, option="environment_kwargs")
    name = options.pop("domain", toy_retail.NAME)
    if name == toy_retail.NAME:
        domain = open_toy_retail(config, options)
    elif all(part in tau2.SPLITS for part in name.split("+")):
        domain = open_tau2(config, options, name.split("+"))
    else:
        known = ", ".join((toy_retail.NAME, *tau2.SPLITS))
        raise ConfigError(f"environment_kwargs domain={name} is none of {known}, nor several of tau2's with + between them")
    if options:
        raise ConfigError(f"environment_kwargs: domain={name} has no option {next(iter(options))}; drop it")
    return episodes(config, chat, domain)


def open_toy_retail(config: TrainerConfig, options: Options) -> Domain:
    model = customer_model(config, options)
    customer = toy_retail.scripted if model is None else toy_retail.played_by(model)
    folder = Path(config.tasks_dir).expanduser() if config.tasks_dir else toy_retail.FOLDER
    return toy_retail.load_domain(folder, customer=customer, close=None if model is None else model.close)


def open_tau2(config: TrainerConfig, options: Options, names: list[str]) -> Domain:
    """The official splits of some of the benchmark's domains: trained on one, held out the other."""
    if config.tasks_dir is not None:
        raise ConfigError(f"tasks_dir is not for domain={'+'.join(names)}, whose tasks are the benchmark's own; drop it")
    if config.tau2_home is None:
        raise ConfigError(f"domain={'+'.join(names)} needs the benchmark itself: run scripts/setup_tau.sh, and set TAU2_HOME or tau2_home")
    grading: tau2.Grading = one_of(options, "grading", tau2.GRADINGS)
    workers = tau2.worker_settings(
        Path(config.tau2_home).expanduser(),
        num_workers=int(number(options, "workers", NUM_WORKERS)),
        step_timeout_s=number(options, "step_timeout_s", STEP_TIMEOUT_S),
    )
    is_parallel = one_of(options, "parallel_tool_calls", ("false", "true")) == "true"
    model = customer_model(config, options)
    judge = open_endpoint(config.judge_base_url, config.judge_model) if config.judge_base_url and config.judge_model else None
    pool = WorkerPool(workers)
    parts = tau2.Tau2Parts(pool=pool, make_customer=tau2_customers(model), grading=grading, judge=judge)

    def tasks(splits: list[tuple[str, str | None]]) -> list[Task]:
        found = [task for name, split in splits if split is not None for task in tau2.official_tasks(workers, name, split)]
        return tau2.gradable(found, grading=grading, has_judge=judge is not None)

    async def close() -> None:
        await pool.close()
        for resource in (model, judge):
            if resource is not None:
                await resource.close()

    return Domain(
        tasks=tasks([(name, tau2.SPLITS[name][0]) for name in names]),
        held_out=tasks([(name, tau2.SPLITS[name][1]) for name in names]),
        make=lambda task, seed: ServiceEnv(tau2.Tau2Episode(task, seed, parts), parallel_tool_calls=is_parallel),
        close=close,
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
