"""env=tau_bench: service domains graded as tau2-bench grades them, by name: environment_kwargs=domain=toy_retail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from src.chat import Chat
from src.config import TrainerConfig, pairs
from src.envs import toy_retail
from src.envs.base import TaskSource
from src.envs.episodes import Domain, episodes
from src.errors import ConfigError

Options = dict[str, str]  # a domain takes out what it honours; what is left over is refused


def open_toy_retail(config: TrainerConfig, options: Options) -> Domain:
    customer = options.pop("customer", "scripted")
    if customer != "scripted":
        raise ConfigError(f"environment_kwargs customer={customer}: {toy_retail.NAME} has scripted customers; drop it")
    return toy_retail.load_domain(Path(config.tasks_dir).expanduser() if config.tasks_dir else toy_retail.FOLDER)


DOMAINS: Mapping[str, Callable[[TrainerConfig, Options], Domain]] = {toy_retail.NAME: open_toy_retail}


def open_tau_bench(config: TrainerConfig, chat: Chat) -> TaskSource:
    """ConfigError for a domain or an option that there is not."""
    options = pairs(config.environment_kwargs, option="environment_kwargs")
    name = options.pop("domain", toy_retail.NAME)
    if name not in DOMAINS:
        raise ConfigError(f"environment_kwargs domain={name} is none of {', '.join(DOMAINS)}")
    domain = DOMAINS[name](config, options)
    if options:
        raise ConfigError(f"environment_kwargs: domain={name} has no option {next(iter(options))}; drop it")
    return episodes(config, chat, domain)
