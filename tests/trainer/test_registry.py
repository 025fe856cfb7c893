"""Tests the table of environments: built-in and registered names, modules of users, and one-line errors."""

from __future__ import annotations

import re
import sys

import pytest

from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.envs.registry import known_environments, open_task_source
from tests.fakes.run import OWN_SERVER
from tests.fakes.tokenizer import toy_chat


def open_env(env: str):
    return open_task_source(parse([*OWN_SERVER, f"env={env}"]), toy_chat())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "retial",
            "env=retial is none of data, fleet, harbor.*; choose one, or give your own as env=module:factory",
        ),
        (
            "no.such.module:open",
            r"cannot import no.such.module \(No module named 'no'\); install it, or add its directory",
        ),
        ("tests.trainer.test_registry:nothing", "tests.trainer.test_registry has no function nothing"),
    ],
)
@pytest.mark.seed_behaviour(14)
def test_an_unknown_environment_gives_a_one_line_error(name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        open_env(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (":f", "env=:f is none of"),
        (".mine:f", "env=.mine:f is none of"),
        ("mine:", "env=mine: is none of"),
        ("mine:NUMBER", "env=mine:NUMBER: NUMBER of mine is not a function"),
        ("mine:later", "env=mine:later: later of mine is an async function; write def later(config, chat)"),
        (
            "mine:nothing",
            "env=mine:nothing returned NoneType, which is not a task source; "
            "return episodes(...) of src.envs.episodes",
        ),
        (
            "mine:no_options",
            "env=mine:no_options: TypeError: no_options() takes 0 positional arguments but 2 were given",
        ),
        ("mine:broken", "env=mine:broken: RuntimeError: no data"),
        ("torn:f", "env=torn:f: cannot import torn (SyntaxError: "),
    ],
)
def test_an_error_in_the_users_module_gives_a_one_line_error(env, message, tmp_path, monkeypatch):
    (tmp_path / "torn.py").write_text("def f(:\n")
    (tmp_path / "mine.py").write_text(
        "NUMBER = 5\nasync def later(config, chat): ...\n"
        "def nothing(config, chat): ...\ndef no_options(): ...\n"
        "def broken(config, chat): raise RuntimeError('no data')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        open_env(env)


@pytest.fixture
def installed_package(tmp_path, monkeypatch):
    """Install a package that registers two environments, one with the name of a built-in one."""
    package = tmp_path / "shop-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    lines = [
        "[agent_trainer.environments]",
        "shop = tests.trainer.test_episodes:open_say",
        "harbor = tests.trainer.test_episodes:nothing",
    ]
    (package / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.usefixtures("installed_package")
@pytest.mark.seed_behaviour(14, 92)
def test_a_package_registers_its_environments_by_name():
    assert known_environments()["shop"] == "tests.trainer.test_episodes:open_say"
    assert len(open_env("shop").train) == 4


@pytest.mark.usefixtures("installed_package")
def test_a_package_cannot_replace_a_built_in_environment():
    assert known_environments()["harbor"] == "src.envs.harbor.environment:open_harbor"
