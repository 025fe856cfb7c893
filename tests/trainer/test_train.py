import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from src.cli.command_line import parse
from src.cli.environment_variables import (
    load_environment,
    with_judge_from_environment,
    with_locations_from_environment,
)
from src.core.errors import INTERRUPTED
from src.core.process import run_until_signal
from src.evaluate.probe import __main__ as probe
from src.train import main

ROOT = Path(__file__).resolve().parents[2]
VALID = ["model_name=m", "tasks_dir=t", "backend=skyrl-tx", "skyrl_tx_url=http://127.0.0.1:9"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Hide keys, stored credentials and .env files, and restore all variables after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)
    for name in (
        "TINKER_API_KEY",
        "TINKER_CREDENTIAL_CMD",
        "TINKER_BASE_URL",
        "SKYRL_TX_URL",
        "TRAINER_DEBUG",
        "TAU2_HOME",
    ):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["modle_name=x"], 2, "error: unknown option 'modle_name'; did you mean model_name?"),
        ([*VALID, "bach_size=3"], 2, "error: unknown option 'bach_size'; did you mean batch_size?"),
        (["model_name"], 2, "error: 'model_name' is not key=value; write model_name=VALUE, or --help"),
        (
            ["model_name=m"],
            2,
            "error: missing: tasks_dir; write tasks_dir=DIRECTORY, a directory of Harbor tasks "
            "(--help lists the options)",
        ),
        (VALID[:3], 2, "error: backend=skyrl-tx needs skyrl_tx_url=http://host:port"),
        (
            [*VALID[:3], "skyrl_tx_url=http://h:99999"],
            2,
            "error: backend=skyrl-tx needs skyrl_tx_url=http://host:port",
        ),
        (
            [*VALID[:3], "skyrl_tx_url=http://[::1"],
            2,
            "error: backend=skyrl-tx needs skyrl_tx_url=http://host:port",
        ),
        (
            VALID[:2],
            2,
            "error: backend=tinker needs an API key: set TINKER_API_KEY (the environment or .env), "
            "or use backend=skyrl-tx",
        ),
        (
            VALID,
            1,
            "error: no server answers at http://127.0.0.1:9 (ConnectError); start it, or correct the address",
        ),
    ],
)
@pytest.mark.seed_behaviour(116)
def test_a_mistake_gives_one_line_and_no_traceback(argv, status, line, capsys):
    assert main(argv) == status
    assert capsys.readouterr().err == line + "\n"
    assert os.listdir() == []  # no file was written


def test_a_key_of_the_wrong_form_is_refused_before_it_is_sent(capsys):
    os.environ["TINKER_API_KEY"] = "sk-123"
    assert main(VALID[:2]) == 2
    assert capsys.readouterr().err.startswith("error: TINKER_API_KEY does not begin with tml-")


def test_help_names_every_option_with_its_default(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "model_name (required)" in text
    assert "proactive_summarization_threshold = 8000" in text
    assert "Held-out tasks" in text


def test_help_with_a_word_lists_the_options_that_contain_it(capsys):
    assert main(["--help", "Learning_rate"]) == 0
    text = capsys.readouterr().out
    options = [line.split()[0] for line in text.splitlines() if re.match(r"  \w", line)]
    assert "learning_rate" in options and "env" not in options and len(options) < 10
    assert main(["--help", "no-such-word"]) == 0
    assert capsys.readouterr().out == "no option contains no-such-word; --help lists all options\n"


def test_help_into_a_closed_pipe_prints_no_traceback(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert main(["--help"]) == 0


@pytest.mark.seed_behaviour(119)
def test_env_files_set_only_missing_variables(tmp_path):
    (tmp_path / ".env").write_text("TINKER_API_KEY=tml-from-env\n")
    (tmp_path / ".env.skyrl-tx").write_text("TINKER_API_KEY=tml-from-skyrl\nSKYRL_TX_URL=http://own:1\n")
    load_environment(["backend=tinker"])
    assert "SKYRL_TX_URL" not in os.environ
    load_environment(["backend=skyrl-tx"])
    assert os.environ["TINKER_API_KEY"] == "tml-from-env"
    assert with_locations_from_environment(["backend=skyrl-tx"]) == [
        "backend=skyrl-tx",
        "skyrl_tx_url=http://own:1",
    ]
    assert with_locations_from_environment(VALID) == VALID
    assert with_locations_from_environment(["backend=tinker"]) == ["backend=tinker"]


@pytest.mark.seed_behaviour(113)
def test_the_probe_and_the_short_check_read_the_env_files_too(tmp_path):
    (tmp_path / ".env").write_text("TINKER_API_KEY=tml-from-env\n")
    (tmp_path / ".env.skyrl-tx").write_text("SKYRL_TX_URL=http://127.0.0.1:9\n")
    assert probe.main(["http://127.0.0.1:9"]) == 2
    assert os.environ["TINKER_API_KEY"] == "tml-from-env"
    check = [sys.executable, ROOT / "scripts" / "test_skyrl_tx.py"]
    environment = {name: value for name, value in os.environ.items() if name != "SKYRL_TX_URL"}
    assert (
        "no server answers at http://127.0.0.1:9 "
        in subprocess.run(check, env=environment, capture_output=True, text=True).stderr
    )


def test_debugging_shows_the_traceback():
    os.environ["TRAINER_DEBUG"] = "1"
    with pytest.raises(ValueError, match="unknown option"):
        main(["modle_name=x"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_lets_the_run_clean_up(sent):
    messages, cleaned = [], []

    async def work():
        try:
            os.kill(os.getpid(), sent)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    assert await asyncio.wait_for(run_until_signal(work(), messages.append), 10) == INTERRUPTED
    assert cleaned == [True]
    assert messages == ["stopping (press Ctrl-C again to stop at once)"]


def test_the_second_signal_ends_the_process_at_once():
    script = """
        import asyncio, os, signal
        from src.core.process import run_until_signal
        async def stubborn():
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
        asyncio.run(run_until_signal(stubborn(), print))
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=os.environ | {"PYTHONPATH": root}, timeout=60
    )
    assert done.returncode == INTERRUPTED


def test_a_signal_during_parsing_prints_no_traceback(monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("src.train.parse", interrupted)
    assert main(VALID) == INTERRUPTED


def test_the_variable_tau2_home_sets_the_option(monkeypatch):
    monkeypatch.setenv("TAU2_HOME", "/tau")
    for env in ("env=tau_bench", "environment.env_class=tau_bench", "env=mine:open_mine"):
        assert with_locations_from_environment([env]) == [env, "tau2_home=/tau"]
    for others in (["env=tau_bench", "tau2_home=/mine"], ["a=1"], ["env=data"], ["env=harbor"]):
        assert with_locations_from_environment(others) == others


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, []),
        ({"TAXONOMY_FEEDBACK": "true"}, ["taxonomy_feedback=true"]),
        (
            {"TAXONOMY_FEEDBACK": "True", "TAXONOMY_ALPHA": "2"},
            ["taxonomy_feedback=true", "taxonomy_alpha=2"],
        ),
        ({"TAXONOMY_FEEDBACK": "1"}, []),
        ({"TAXONOMY_FEEDBACK": "true", "SKYRL_MODE": "eval"}, []),
    ],
)
@pytest.mark.seed_behaviour(28, 37, 39)
def test_environment_variables_of_the_seeds_enable_the_judge(environment, added, monkeypatch):
    for name in ("TAXONOMY_FEEDBACK", "TAXONOMY_ALPHA", "SKYRL_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert with_judge_from_environment(["taxonomy_alpha=3"]) == ["taxonomy_alpha=3", *added]
    assert os.environ["SKYRL_MODE"] == environment.get("SKYRL_MODE", "train")


@pytest.mark.seed_behaviour(44)
def test_taxonomy_alpha_prefers_the_environment_to_the_option(monkeypatch):
    monkeypatch.delenv("TAXONOMY_ALPHA", raising=False)
    assert parse(with_judge_from_environment(VALID)).taxonomy_alpha == 1.0
    assert parse(with_judge_from_environment([*VALID, "taxonomy_alpha=3"])).taxonomy_alpha == 3.0
    monkeypatch.setenv("TAXONOMY_ALPHA", "0.5")
    assert parse(with_judge_from_environment([*VALID, "taxonomy_alpha=3"])).taxonomy_alpha == 0.5
