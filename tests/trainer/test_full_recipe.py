"""Tests `./run_skyrl_tx.sh` for a model of the user.

The script fits its default lengths to the context of the server. It uses a running server, or states in one
line why it does not.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import chz
import pytest

from scripts import recipe_options, run_skyrl_tx
from scripts.quick_starts import QUICKSTARTS
from scripts.recipe_options import RECIPE_OPTIONS, fitted, named_model, recipe_defaults, wandb_is_set_up
from scripts.run_skyrl_tx import check_tokenizer_and_tasks, in_trainer_names, main, trainer_arguments
from src.cli.command_line import parse
from src.config import TrainerConfig
from src.core.errors import BackendError, ConfigError
from src.envs.harbor import environment
from src.policy.backend import check_alive
from src.policy.running_server import NO_SERVER, ServedModels, find_server
from src.records.run_directory import lock_run_dir

KEY = "tml-of-the-server"


@contextmanager
def server(models: dict[str, int], *, health: int = 200, key: str | None = None) -> Iterator[str]:
    """Run a server that answers only the routes for health and capabilities. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("healthz"):
                return self.answer(health, {"status": "ok"})
            if key is not None and self.headers.get("X-API-Key") != key:
                return self.answer(401, {})
            listed = [{"model_name": name, "max_context_length": size} for name, size in models.items()]
            return self.answer(200, {"supported_models": listed})

        def answer(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


@pytest.fixture
def trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[dict[str, str], object, tuple[str, ...]]]:
    """Replace the functions that start the server and the trainer.

    Returns the list of trainer starts, each with the options of the trainer, the process of the server (None
    if the server was running already) and the arguments of the last started server.
    """
    calls: list[tuple[dict[str, str], object, tuple[str, ...]]] = []
    started: list[tuple[str, ...]] = []

    class Process:
        def terminate(self) -> None:
            started.append(("terminated",))

        def wait(self, timeout: float | None = None) -> int:
            return 0

    def start_server(url: str, arguments: tuple[str, ...], side_files: Path, *, key: str) -> Process:
        started.append(arguments)
        monkeypatch.setattr(run_skyrl_tx, "find_server", lambda *_, **__: ServedModels(contexts=STARTED))
        return Process()

    def train(options: dict[str, str], process: object, *, key: str | None) -> int:
        parse(trainer_arguments(options))
        calls.append((options, process, started[-1] if started else ()))
        return 0

    monkeypatch.setattr(run_skyrl_tx, "start_server", start_server)
    monkeypatch.setattr(run_skyrl_tx, "check_tokenizer_and_tasks", lambda config: None)
    monkeypatch.setattr(run_skyrl_tx, "train", train)
    monkeypatch.setattr(run_skyrl_tx, "load_dotenv", lambda _: None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "TINKER_API_KEY", "SKYRL_TX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "model").mkdir()
    return calls


# The models of a started server, with their contexts in tokens.
STARTED = {"local/model": 4096, "org/name": 32768}


@pytest.mark.seed_behaviour(114)
def test_a_healthy_server_is_used_and_its_context_is_the_limit(trained, monkeypatch, capfd) -> None:
    with server({"local/model": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main(["model_name=./model", "tasks_dir=tasks"]) == 0
    ((options, process, _),) = trained
    assert process is None and options["skyrl_tx_url"] == url
    assert options["model_name"] == "local/model" and options["tokenizer"] == "./model"
    output = capfd.readouterr().out
    assert f"using the server at {url}: local/model, 4096 tokens" in output
    assert (
        "fitted to the server's context of 4096 tokens: context_limit=4096 instead of 128000, "
        "max_tokens=1024 instead of 2048, proactive_summarization_threshold=1024 instead of 8000"
    ) in output
    assert "wandb is off" in output and "wandb_project" not in options
    assert options["log_path"].startswith("./runs/tasks-model-20")


@pytest.mark.seed_behaviour(114)
def test_a_server_with_another_model_is_not_used(trained, monkeypatch, capfd) -> None:
    with server({"org/other": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main(["model_name=./model", "tasks_dir=tasks", f"skyrl_tx_url={url}"]) == 2
        assert main(["model_name=./model", "tasks_dir=tasks"]) == 0
    ((options, process, arguments),) = trained
    assert process is not None and options["skyrl_tx_url"] != url
    assert arguments == ("base_model=./model", "model_alias=local/model", "max_lora_rank=32")
    captured = capfd.readouterr()
    assert f"not using the server at {url}: it serves org/other, not local/model" in captured.out
    assert f"skyrl_tx_url={url}: it serves org/other, not local/model" in captured.err


def test_a_missing_server_is_started_with_the_users_options(trained) -> None:
    assert main(["model_name=org/name", "tasks_dir=tasks", "context_limit=5000", "lora_rank=8"]) == 0
    ((options, _, arguments),) = trained
    assert arguments[2:] == ("max_lora_rank=8", "max_context_length=5000", "yarn=true")
    assert options["context_limit"] == "5000" and "tokenizer" not in options


@pytest.mark.parametrize("run", [["model_name=org/name", "tasks_dir=tasks"], ["quickstart=terminal"]])
def test_a_started_server_gets_the_users_checkpoints_dir(run: list[str], trained) -> None:
    assert main([*run, "checkpoints_dir=/data/ck"]) == 0
    ((options, _, arguments),) = trained
    assert arguments[-1] == "checkpoints_dir=/data/ck" and "checkpoints_dir" not in options


def test_a_running_server_keeps_its_checkpoints_dir(trained, monkeypatch, capfd) -> None:
    with server({"local/model": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main(["model_name=./model", "tasks_dir=tasks", "checkpoints_dir=/data/ck"]) == 2
    assert (
        not trained and f"checkpoints_dir=/data/ck: the server at {url} is running" in capfd.readouterr().err
    )


def test_a_users_option_that_does_not_fit_is_refused_by_name(trained, monkeypatch, capfd) -> None:
    with server({"local/model": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        for option in (
            "max_tokens=many",
            "context_limit=5000",
            "max_tokens=4096",
            "proactive_summarization_threshold=4000",
        ):
            assert main(["model_name=./model", "tasks_dir=tasks", option]) == 2
            error = capfd.readouterr().err
            assert error.startswith(f"run_skyrl_tx: {option}") and error.count("\n") == 1
    assert trained == []


@pytest.mark.parametrize("directory", ["run", "run.server"])
@pytest.mark.parametrize("run", [["model_name=org/name", "tasks_dir=tasks"], ["quickstart=terminal"]])
def test_no_server_starts_for_a_directory_in_use(
    run: list[str], directory: str, trained, tmp_path: Path, capfd
) -> None:
    with lock_run_dir(tmp_path / directory):
        assert main([*run, f"log_path={tmp_path / 'run'}"]) == 2
    assert f"{tmp_path / directory} is in use by a running process" in capfd.readouterr().err
    assert trained == [] and not (tmp_path / "run.server").exists()


@pytest.mark.parametrize("run", [["model_name=org/name", "tasks_dir=tasks"], ["quickstart=terminal"]])
def test_a_run_locks_the_directory_of_its_server(
    run: list[str], trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_server = run_skyrl_tx.start_server

    def start_locked(url: str, arguments: tuple[str, ...], directory: Path, *, key: str) -> object:
        with pytest.raises(ConfigError, match="is in use"), lock_run_dir(directory):
            pass
        return start_server(url, arguments, directory, key=key)

    monkeypatch.setattr(run_skyrl_tx, "start_server", start_locked)
    assert main([*run, f"log_path={tmp_path / 'run'}"]) == 0
    with lock_run_dir(tmp_path / "run.server"):  # the lock ends with the command
        assert len(trained) == 1


@pytest.mark.parametrize("action", ["resume", "evaluate", "chat"])
def test_no_server_of_a_run_starts_during_another_start(action: str, trained, tmp_path: Path, capfd) -> None:
    run, server_directory = tmp_path / "run", tmp_path / "run.server"
    for directory in (run, server_directory):
        directory.mkdir()
    saved = TrainerConfig(
        backend="skyrl-tx",
        skyrl_tx_url="http://127.0.0.1:1",
        model_name="m",
        tasks_dir=str(tmp_path / "tasks"),
    )
    (run / "config.json").write_text(json.dumps(chz.asdict(saved)))
    (run / "checkpoints.jsonl").touch()
    (server_directory / "server.json").write_text("[]")
    (server_directory / "api_key").write_text(KEY)
    with lock_run_dir(server_directory):
        assert main([f"{action}={run}"]) == 2
    assert f"{server_directory} is in use by a running process" in capfd.readouterr().err
    assert trained == [] and (server_directory / "api_key").read_text() == KEY


def test_no_server_starts_for_a_directory_with_another_run(trained, tmp_path: Path, capfd) -> None:
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    arguments = ["model_name=org/name", "tasks_dir=tasks", f"log_path={tmp_path / 'run'}"]
    assert main(arguments) == 2
    assert f"log_path {tmp_path / 'run'} has a run; add behavior_if" in capfd.readouterr().err
    assert trained == []
    assert main([*arguments, "behavior_if_log_dir_exists=delete"]) == 0
    assert len(trained) == 1


def test_a_server_that_was_started_is_stopped_on_a_mistake(trained, capfd) -> None:
    assert main(["model_name=./model", "tasks_dir=tasks", "max_tokens=4096"]) == 2
    assert "max_tokens=4096 leaves no room for a prompt" in capfd.readouterr().err
    assert trained == []


@pytest.mark.seed_behaviour(144)
def test_the_model_and_options_may_have_names_of_skyrl(trained, monkeypatch, capfd) -> None:
    skyrl_options = ["trainer.policy.model.path=org/name", "trainer.policy.optimizer_config.lr=2e-5"]
    with server({"org/name": 32768}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main([*skyrl_options, "tasks_dir=tasks", "eval_interval=3"]) == 0
    ((options, _, _),) = trained
    assert (options["model_name"], options["learning_rate"], options["eval_every"]) == (
        "org/name",
        "2e-5",
        "3",
    )
    assert "converted to model_name=org/name learning_rate=2e-5 eval_every=3" in capfd.readouterr().err
    assert main(["trainer.policy.model.path=org/name", "trainer.critic.model.path=m"]) == 2
    assert (
        capfd.readouterr().err.splitlines()[-1].startswith("run_skyrl_tx: trainer.critic.model.path cannot")
    )


@pytest.mark.seed_behaviour(114)
def test_without_model_name_the_served_model_is_trained(trained, monkeypatch) -> None:
    with server({"org/name": 32768}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main(["tasks_dir=tasks"]) == 0
    ((options, _, _),) = trained
    assert options["model_name"] == "org/name" and options["context_limit"] == "32768"


def test_the_tokenizer_of_a_served_directory_is_found(trained, monkeypatch) -> None:
    monkeypatch.setattr(run_skyrl_tx, "tokenizer_directory", lambda url, *, model_name, key: "/the/directory")
    with server({"local/model": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main(["tasks_dir=tasks"]) == 0
    ((options, process, _),) = trained
    assert process is None and options["skyrl_tx_url"] == url
    assert (options["model_name"], options["tokenizer"]) == ("local/model", "/the/directory")


@pytest.mark.parametrize("tasks", ["tasks_dir=tasks", "data=questions.jsonl", "env=my_env:open_my_env"])
def test_no_quick_start_replaces_a_run_on_other_tasks(tasks: str, trained, monkeypatch, capfd) -> None:
    monkeypatch.setattr(run_skyrl_tx, "tokenizer_directory", lambda url, *, model_name, key: None)
    with server({"local/model": 4096}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main([tasks]) == 2
    with server({}, health=404) as other:
        monkeypatch.setenv("SKYRL_TX_URL", other)
        assert main([tasks]) == 2
    assert trained == []
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(f"run_skyrl_tx: cannot use the server at {url}: ") and "model_name=" in first
    assert second == (
        f"run_skyrl_tx: cannot use the server at {other}: it is not a Tinker endpoint: /api/v1/healthz "
        "answered 404; give model_name=MODEL to start another server"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tasks_dir=tasks"], "/tasks contains no task directories"),
        (["tasks_dir=good", "eval_tasks=absent"], "eval_tasks: 'absent' matches no task"),
        (["tasks_dir=good", "environment_kwargs=absent=1"], "environment_kwargs"),
        (
            ["model_name=./model", "tasks_dir=good", "eval_tasks=absent"],
            "eval_tasks: 'absent' matches no task",
        ),
    ],
)
def test_wrong_harbor_tasks_are_refused_before_a_server_starts(
    options: list[str], message: str, trained, monkeypatch, capfd
) -> None:
    shutil.copytree(run_skyrl_tx.QUICKSTART / "model", "model", dirs_exist_ok=True)
    shutil.copytree(run_skyrl_tx.QUICKSTART / "train", "good")
    monkeypatch.setattr(run_skyrl_tx, "check_tokenizer_and_tasks", check_tokenizer_and_tasks)
    monkeypatch.setattr(run_skyrl_tx, "start_server", lambda *_, **__: pytest.fail("a server was started"))
    monkeypatch.setattr(environment, "why_no_sandbox", lambda: None)  # this machine may have no sandbox
    monkeypatch.setenv("SKYRL_TX_URL", "http://127.0.0.1:1")
    assert main(["environment_type=sandbox", *options]) == 2
    assert message in capfd.readouterr().err


def test_without_a_model_an_unknown_environment_is_named(trained, monkeypatch, capfd) -> None:
    monkeypatch.setenv("SKYRL_TX_URL", "http://127.0.0.1:1")
    assert main(["env=tau_bnch"]) == 2
    assert "env=tau_bnch is none of data, fleet, harbor, openenv, tau_bench" in capfd.readouterr().err


def test_a_missing_tokenizer_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((run_skyrl_tx.QUICKSTART / "model" / "config.json").read_text())
    options = ["model_name=local/model", f"tokenizer={tmp_path}", "data=x.jsonl", "reward=number"]
    with pytest.raises(ConfigError, match=r"no tokenizer in .*: it has no tokenizer files"):
        check_tokenizer_and_tasks(parse([*options, "skyrl_tx_url=http://127.0.0.1:9", "backend=skyrl-tx"]))


@pytest.mark.parametrize("name", ["/none/model", "./none", "a/b/c"])
def test_a_missing_model_directory_is_refused(name: str, trained, capfd) -> None:
    assert main([f"model_name={name}", "tasks_dir=."]) == 2
    assert f"model_name={name}: no such directory; give a model directory" in capfd.readouterr().err
    assert not trained


def test_a_quick_start_on_other_tasks_holds_out_some_of_them(trained, monkeypatch) -> None:
    monkeypatch.setenv("SKYRL_TX_URL", "http://127.0.0.1:1")
    assert main(["tasks_dir=tasks"]) == main(["quickstart=terminal"]) == 0
    (other_tasks, _, _), (quick_start, _, _) = trained
    assert "eval_tasks" not in other_tasks and "eval_tasks" in quick_start


def test_the_server_of_a_quick_start_allows_the_users_limits(trained) -> None:
    assert main(["quickstart=terminal", "lora_rank=32", "context_limit=4096"]) == 0
    assert main(["quickstart=terminal", "lora_rank=8"]) == 0
    (_, _, raised), (_, _, default) = trained
    assert {"max_lora_rank=32", "max_context_length=4096", "yarn=true"} <= {*raised}
    assert {"max_lora_rank=16", "max_context_length=2048"} <= {*default} and "yarn=true" not in default


def test_a_quick_start_refuses_the_address_of_a_server(trained, capfd) -> None:
    assert main(["quickstart=terminal", "skyrl_tx_url=http://10.0.0.1:8000"]) == 2
    assert "a quick start starts its own server; remove skyrl_tx_url" in capfd.readouterr().err
    assert not trained


def test_a_relative_path_of_the_quick_starts_model_is_known(trained, monkeypatch) -> None:
    monkeypatch.chdir(run_skyrl_tx.ROOT)
    assert main(["quickstart=terminal", "model_name=datasets/quickstart/model", "log_path=/tmp/unused"]) == 0
    assert trained[0][0]["model_name"] == "local/quickstart" and "load_checkpoint_path" not in trained[0][0]


def test_a_run_ends_when_its_server_ends(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers of the tests stay in place
    start = subprocess.Popen

    def start_without_function(command: list[str], *, preexec_fn: object = None, **options: Any) -> object:
        # Other tests import JAX, whose fork handler gives a warning. `Popen` runs fork handlers only if
        # `preexec_fn` is given.
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_without_function)
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    never_ends = ("http.server", ["0", "--bind", "127.0.0.1"])
    assert run_skyrl_tx.run_program(*never_ends, key=None, server=server) == 1
    output = capfd.readouterr().out
    assert "the server has ended with status 3; the end of its log" in output
    assert "start the command again" in output and "resume" not in output


def test_the_fine_tuning_of_a_quick_start_ends_with_its_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched: list[object] = []

    def run_program(module: str, arguments: list[str], *, key: str, server: object = None) -> int:
        watched.append(server)
        return 1

    monkeypatch.setattr(run_skyrl_tx, "run_program", run_program)
    warm_start, server = QUICKSTARTS["terminal"].warm_start, object()
    fine_tune: Any = run_skyrl_tx.fine_tune
    options = {"log_path": str(tmp_path / "run")}
    assert fine_tune(warm_start, options, tmp_path, server, key=KEY) == (1, "")
    assert watched == [server]


def test_xla_programs_are_printed_only_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(run_skyrl_tx, "run_program", lambda *_, **__: 0)
    monkeypatch.setattr(run_skyrl_tx, "stop", lambda _: None)
    monkeypatch.setattr(run_skyrl_tx, "print_programs", lambda url, *, key: printed.append(url))
    monkeypatch.delenv("TRAINER_DEBUG", raising=False)
    server: Any = object()
    run_skyrl_tx.train({"skyrl_tx_url": "http://h:1"}, server, key=KEY)
    assert printed == []
    monkeypatch.setenv("TRAINER_DEBUG", "1")
    run_skyrl_tx.train({"skyrl_tx_url": "http://h:1"}, server, key=KEY)
    assert printed == ["http://h:1"]


@pytest.mark.seed_behaviour(134)
def test_the_default_tasks_are_terminal_bench_2(trained, monkeypatch, capfd, tmp_path: Path) -> None:
    with server({"org/name": 32768}) as url:
        monkeypatch.setenv("SKYRL_TX_URL", url)
        assert main([]) == main(["model_name=org/name"]) == 0
        line = "there is no ./datasets/terminal-bench-2 (scripts/setup.sh terminal-bench-2 downloads it): "
        assert capfd.readouterr().out.count(line + "training on datasets/quickstart/train\n") == 2
        (tmp_path / "datasets" / "terminal-bench-2").mkdir(parents=True)
        assert main([]) == 0
    missing, named, downloaded = (options for options, _, _ in trained)
    assert missing["tasks_dir"] == named["tasks_dir"] == str(run_skyrl_tx.QUICKSTART / "train")
    assert missing["environment_type"] == "sandbox" and downloaded["environment_type"] == "auto"
    assert downloaded["tasks_dir"] == "./datasets/terminal-bench-2"


@pytest.mark.seed_behaviour(134)
def test_a_missing_directory_of_tasks_gives_a_one_line_error(trained, capfd) -> None:
    assert main(["model_name=org/name", "tasks_dir=./datasets/terminal-bench-2"]) == 2
    assert capfd.readouterr().err.endswith(
        "tasks_dir ./datasets/terminal-bench-2 is not a directory; download it with scripts/setup.sh "
        "terminal-bench-2\n"
    )
    assert main(["model_name=org/name", "tasks_dir=other"]) == 2
    assert (
        "tasks_dir other is not a directory; give a directory of task directories" in capfd.readouterr().err
    )


def test_the_reason_against_a_server_is_one_line() -> None:
    with server({"a/b": 64}, key=KEY) as url:
        assert find_server(url, key=KEY) == ServedModels(contexts={"a/b": 64})
        assert "it refuses the key" in str(find_server(url, key=""))
    with server({}, health=503) as url:
        assert find_server(url, key="") == "it is not ready yet"
    with server({}, health=404) as url:
        assert "it is not a Tinker endpoint" in str(find_server(url, key=""))
        with pytest.raises(BackendError, match="the server has failed, or it is not a Tinker endpoint"):
            asyncio.run(check_alive(url))
    assert find_server(url, key="") == NO_SERVER


@pytest.mark.parametrize("context", [16, 64, 512, 2048, 8192, 32768, 131072])
@pytest.mark.parametrize("kind", ["harbor", "tau_bench"])
@pytest.mark.seed_behaviour(117)
def test_the_defaults_fit_every_context(kind: str, context: int) -> None:
    user_options = {"tasks_dir": "tasks"} if kind == "harbor" else {}
    defaults = recipe_defaults(kind, named_model("org/name"), {"env": kind} | user_options)
    options, note = fitted({**defaults, "env": kind, **user_options}, user_options, context=context)
    options |= {"model_name": "org/name", "skyrl_tx_url": "http://localhost:8000"}
    config = parse(trainer_arguments(options))
    assert config.context_limit == min(context, 128_000) and (note is None) is (context > 128_000)
    if context > 32_000:
        assert options["max_tokens"] == RECIPE_OPTIONS["max_tokens"]


def test_a_default_follows_the_users_options() -> None:
    user_options = {"tasks_dir": "tasks", "max_tokens": "3500"}
    options = recipe_defaults("harbor", named_model("org/name"), user_options) | user_options
    options, note = fitted(options, user_options, context=4096)
    assert options["max_tokens"] == "3500" and options["proactive_summarization_threshold"] == "298"
    assert note is not None and "max_tokens=" not in note
    with pytest.raises(ConfigError, match=r"context_limit=9000 exceeds the server's 4096 tokens; lower it"):
        fitted(options | {"context_limit": "9000"}, {"context_limit": "9000"}, context=4096)


@pytest.mark.parametrize("wandb_name", ["none", "NULL", ""])
def test_a_run_without_wandb_name_has_a_directory_of_its_own(wandb_name: str) -> None:
    options = recipe_defaults("harbor", named_model("org/name"), {"wandb_name": wandb_name})
    assert options["log_path"].startswith("./runs/harbor-name-20")


@pytest.mark.seed_behaviour(117)
def test_wandb_is_on_with_a_key_a_mode_or_a_login(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    assert not wandb_is_set_up({"NETRC": str(netrc)})
    assert wandb_is_set_up({"WANDB_MODE": "offline"}) and wandb_is_set_up({"WANDB_API_KEY": "k"})
    netrc.write_text("machine api.wandb.ai login user password k\n")
    netrc.chmod(0o600)
    assert wandb_is_set_up({"NETRC": str(netrc)})


def test_a_gguf_file_provides_its_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipe_options, "converted_directory", lambda name: tmp_path)
    model = named_model("smollm2-135m")
    assert (model.served_name, model.tokenizer) == ("local/smollm2-135m", str(tmp_path))
    assert named_model("models/tiny.gguf").served_name == "local/tiny"


def test_a_server_error_has_the_trainers_option_names() -> None:
    line = "skyrl-tx server: max_context_length=9 is outside 1..8"
    assert in_trainer_names(line) == "skyrl-tx server: context_limit=9 is outside 1..8"
