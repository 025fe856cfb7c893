"""Tests the default server of `agent-trainer try`, and the length limits that its context requires."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from src.cli.command_line import parse_as
from src.core.errors import ConfigError
from src.envs.try_env import TryConfig
from src.envs.try_server import with_backend, with_local_server
from src.policy.served_model import fitted_to_server
from tests.trainer.test_full_recipe import server

MODEL = ["env=tau_bench", "model_name=org/model"]
OUR_BACKEND = "backend=skyrl-tx"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


async def fitted(*argv: str, context: int) -> list[str]:
    """Return the lengths that change for a server with this context."""
    with server({"org/model": context}) as url:
        command = [*MODEL, OUR_BACKEND, f"skyrl_tx_url={url}", *argv]
        config = parse_as(TryConfig, command)
        lengths = fitted_to_server(config, command, config.lengths_to_fit).lengths_to_fit
    return [f"{name}={value}" for name, value in lengths.items() if value != config.lengths_to_fit[name]]


def test_a_model_without_a_key_for_the_cloud_is_served_locally():
    assert with_backend(MODEL) == [*MODEL, OUR_BACKEND]


def test_a_key_for_the_cloud_selects_the_cloud(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    assert with_backend(MODEL) == MODEL


@pytest.mark.parametrize(
    "argv",
    [
        ["env=tau_bench", "policy=typed"],
        [*MODEL, "policy=scripted"],
        [*MODEL, "base_url=http://h:1/v1"],
        [*MODEL, "backend=tinker"],
        [*MODEL, "skyrl_tx_url=http://h:1"],
    ],
)
def test_no_backend_is_added_to_options_that_need_none(argv: Sequence[str]):
    assert with_backend(argv) == argv


async def test_a_server_that_answers_is_used():
    with server({"org/model": 2048}) as url:
        command = [*MODEL, OUR_BACKEND]
        assert await with_local_server(command, MODEL, url=url) == [*command, f"skyrl_tx_url={url}"]


async def test_without_a_server_the_error_has_the_commands():
    url = "http://127.0.0.1:9"
    with pytest.raises(ConfigError) as caught:
        await with_local_server([*MODEL, OUR_BACKEND], MODEL, url=url)
    assert str(caught.value) == (
        f"no server is ready at {url}; start one with `scripts/start_skyrl_tx.sh org/model`, then type "
        f"`agent-trainer try env=tau_bench model_name=org/model {OUR_BACKEND} skyrl_tx_url={url}`; "
        "for the Tinker cloud, set TINKER_API_KEY"
    )


async def test_lengths_fit_the_context_of_the_server():
    assert await fitted(context=2048) == ["context_limit=2048", "max_tokens=512"]


async def test_a_context_that_is_large_enough_changes_nothing():
    assert await fitted(context=40_000) == []


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        (["max_tokens=700"], ["context_limit=2048"]),
        (["max_generate_length=700"], ["context_limit=2048"]),
        (["context_limit=32000"], []),
    ],
)
async def test_lengths_of_the_user_are_kept(typed: list[str], added: list[str]):
    assert await fitted(*typed, context=2048) == added


async def test_a_length_of_the_user_that_does_not_fit_is_refused():
    with server({"org/model": 2048}) as url:
        command = [
            "tasks_dir=.",
            "model_name=org/model",
            OUR_BACKEND,
            f"skyrl_tx_url={url}",
            "max_tokens=4000",
        ]
        config = parse_as(TryConfig, command)
        with pytest.raises(
            ConfigError, match="max_tokens=4000 leaves no room for a prompt in context_limit="
        ):
            fitted_to_server(config, command, config.lengths_to_fit)


async def test_the_lengths_of_terminus_2_fit_together():
    with server({"org/model": 2048}) as url:
        command = ["tasks_dir=.", "model_name=org/model", OUR_BACKEND, f"skyrl_tx_url={url}"]
        config = parse_as(TryConfig, command)
        config = fitted_to_server(config, command, config.lengths_to_fit)
    assert (config.context_limit, config.max_tokens) == (2048, 512)
    assert config.proactive_summarization_threshold == 512
