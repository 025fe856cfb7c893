"""The quick starts of `./run_skyrl_tx.sh`."""

from __future__ import annotations

import pytest

from scripts.quick_starts import QUICKSTART_OPTIONS, QUICKSTARTS
from scripts.run_skyrl_tx import chosen_quick_start
from src.cli.command_line import parse
from src.core.errors import ConfigError


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_every_quick_start_is_a_valid_run(name: str) -> None:
    options = QUICKSTART_OPTIONS | QUICKSTARTS[name].options | {"model_name": "local/m"}
    base = ("backend=skyrl-tx", "skyrl_tx_url=http://localhost:1", "log_path=runs/a")
    parse([*base, *(f"{option}={value}" for option, value in options.items())])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "terminal"),
        ({"env": "tau_bench"}, "tau_bench"),
        ({"quickstart": "tau_bench"}, "tau_bench"),
    ],
)
def test_a_quick_start_has_a_name_or_an_environment(given: dict[str, str], name: str) -> None:
    assert chosen_quick_start(given) is QUICKSTARTS[name]


def test_an_unknown_quick_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quickstart=math is none of terminal, tau_bench$"):
        chosen_quick_start({"quickstart": "math"})
