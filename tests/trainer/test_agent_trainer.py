"""Tests `agent-trainer`: its commands, and the options that `resume` and `evaluate` take from a run."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path

import chz
import pytest

from scripts import run_skyrl_tx
from src.cli.agent_trainer import MODULES, command_line, help_text, main
from src.cli.command_line import parse, parse_as
from src.cli.saved_options import SERVER_FILE, evaluated_arguments, resumed_arguments
from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.evaluate.config import EvaluateConfig
from src.evaluate.run import environment_of, prepare_directory
from src.policy.running_server import ServedModels
from src.policy.served_model import with_served_model
from src.records.run_directory import RunDirectory, find_run_directory
from src.sft.config import SftConfig

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "model_name": "org/name",
    "tasks_dir": "tasks",
    "backend": "skyrl-tx",
    "skyrl_tx_url": "http://127.0.0.1:1",
    "max_steps": "7",
    "learning_rate": "2e-4",
    "eval_tasks": "a,b*",
    "loss_fn_config": "clip_low_threshold=0.8,clip_high_threshold=1.3",
    "loss_fn": "ppo",
    "remove_constant_reward_groups": "true",
    "dump_eval_results": "false",
    "trial_timeout_s": "30.5",
    "max_tokens": "100",
    "wandb_name": "a run",
}


def write_run(path: Path, **changes: str) -> TrainerConfig:
    """Write the directory of a run and return its configuration."""
    options = OPTIONS | {"log_path": str(path)} | changes
    config = parse([f"{name}={value}" for name, value in options.items()])
    RunDirectory(path=path, checkpoint=None, delete_first=False).create(config)
    (path / "metrics.jsonl").write_text("")
    return config


def test_resume_restores_every_option_of_a_run(tmp_path: Path) -> None:
    config = write_run(tmp_path / "run", eval_tasks="['a,b', 'c*']")
    assert config.eval_tasks == ["a,b", "c*"]
    resumed = parse(resumed_arguments(str(tmp_path / "run"), []))
    assert resumed == chz.replace(config, behavior_if_log_dir_exists="resume")
    assert find_run_directory(resumed, name="other").path == tmp_path / "run"


def test_options_given_to_resume_replace_those_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    resumed = parse(resumed_arguments(str(tmp_path / "run"), ["max_steps=9", "eval_tasks=none"]))
    assert resumed.max_steps == 9 and resumed.eval_tasks is None and resumed.max_tokens == 100


def test_a_run_of_version_0_1_with_an_unused_tau2_home_resumes(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tau2_home": "/tau2"}))
    assert parse(resumed_arguments(str(tmp_path), [])).tau2_home is None
    assert parse_as(EvaluateConfig, evaluated_arguments(str(tmp_path), [])).tau2_home is None


def test_a_directory_without_a_run_gives_a_one_line_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; give the directory of a run"):
        resumed_arguments(str(tmp_path), [])
    with pytest.raises(ConfigError, match=r"config\.json: File name too long; give the directory of a run"):
        resumed_arguments(str(tmp_path / ("a" * 300)), [])
    (tmp_path / "config.json").write_text("[1]")
    assert main(["resume", str(tmp_path)]) == 2
    assert "config.json: Input should be an object; restore the file" in capfd.readouterr().err


def test_an_evaluation_is_not_resumed_as_a_training_run(tmp_path: Path) -> None:
    config = EvaluateConfig(model_name="m", tasks_dir="t", log_path=str(tmp_path))
    prepare_directory(tmp_path, "m", config)
    with pytest.raises(
        ConfigError, match=r"is the directory of an evaluation, not of a run; to continue the"
    ):
        command_line("resume", [str(tmp_path)])
    (tmp_path / "metrics.jsonl").touch()  # as if the evaluation had results
    training = TrainerConfig(
        model_name="m", tasks_dir="t", log_path=str(tmp_path), behavior_if_log_dir_exists="resume"
    )
    with pytest.raises(ConfigError, match=r"is the directory of an evaluation, not of a run"):
        find_run_directory(training, name="")


def test_every_command_is_a_module_that_exists() -> None:
    assert all(importlib.util.find_spec(module) is not None for module, _ in MODULES.values())
    assert command_line("serve", ["base_model=m"]) == ["skyrl_tx_server", "base_model=m"]
    assert all(name in help_text() for name in (*MODULES, "resume"))


def test_the_commands_of_a_run_search_their_help(tmp_path: Path) -> None:
    write_run(tmp_path)
    for run in ([], [str(tmp_path)]):
        for module, name in (("src.train", "resume"), ("src.evaluate", "evaluate")):
            assert command_line(name, [*run, "--help", "lora"]) == [module, "--help", "lora"]


def test_the_console_script_is_declared() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["agent-trainer"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert "src.cli.agent_trainer" in (ROOT / "scripts" / "setup.sh").read_text()


@pytest.mark.parametrize("arguments", [["trane"], ["resume"], ["resume", "absent"]])
def test_a_mistaken_command_gives_a_one_line_error(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith("agent-trainer: ") and error.count("\n") == 1


def test_a_model_directory_is_requested_by_its_served_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    by_path = ["backend=skyrl-tx", f"model_name={tmp_path}/tiny"]
    by_name = ["backend=skyrl-tx", "model_name=local/tiny"]
    assert with_served_model(by_path) == [*by_name, f"tokenizer={tmp_path}/tiny"]
    assert with_served_model([*by_path, "tokenizer=t"]) == [by_name[0], "tokenizer=t", by_name[1]]
    (tmp_path / "a:b").mkdir()
    assert with_served_model([by_path[0], f"model_name={tmp_path}/a:b"])[1] == "model_name=local/a-b"
    for arguments in (["backend=tinker", by_path[1]], [by_path[0], "model_name=org/name"], [by_path[0]]):
        assert with_served_model(arguments) == arguments


def test_evaluate_takes_every_option_of_a_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    write_run(directory, eval_group_size="3", eval_temperature="0.2", eval_top_p="0.9", tokenizer="t")
    command, *arguments = command_line("evaluate", [str(directory), "max_tokens=50"])
    config = parse_as(EvaluateConfig, arguments)
    assert command == "src.evaluate" and config.checkpoint == config.held_out_of == str(directory)
    assert (config.model_name, config.tokenizer, config.skyrl_tx_url) == (
        "org/name",
        "t",
        "http://127.0.0.1:1",
    )
    assert (config.n_samples, config.temperature, config.top_p, config.max_tokens) == (3, 0.2, 0.9, 50)
    split = environment_of(config)
    assert split.eval_tasks == ["a", "b*"] and split.tasks_dir == "tasks"
    assert command_line("evaluate", ["model_name=m"]) == ["src.evaluate", "model_name=m"]


def test_evaluate_writes_to_the_directory_of_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    write_run(directory)
    written_to = [
        parse_as(EvaluateConfig, evaluated_arguments(str(directory), changes)).log_path
        for changes in ([], ["log_path=/elsewhere"], [f"logs_dir={tmp_path}"])
    ]
    assert written_to[0] is not None and Path(written_to[0]).parent == directory / "evaluations"
    assert written_to[1:] == ["/elsewhere", None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "fast"], "'fast' is not key=value; write evaluate RUN"),
        (["RUN/none"], "give the directory of a"),
    ],
)
def test_a_wrong_evaluate_argument_gives_a_one_line_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        command_line("evaluate", [argument.replace("RUN", str(tmp_path / "run")) for argument in arguments])


def test_resume_starts_the_server_of_the_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (tmp_path / "tasks").mkdir()
    write_run(run, tasks_dir=str(tmp_path / "tasks"))
    assert command_line("resume", [str(run), "max_steps=9"])[0] == "src.train"
    side_files = tmp_path / "run.server"
    side_files.mkdir()
    (side_files / SERVER_FILE).write_text(json.dumps(["base_model=m"]))
    (side_files / "api_key").write_text("tml-old\n")
    launched = command_line("resume", [str(run), "max_steps=9"])
    assert launched == ["scripts.run_skyrl_tx", f"resume={run}", "max_steps=9"]
    started: list[tuple[str, ...]] = []
    trained: list[tuple[dict[str, str], str | None]] = []
    monkeypatch.setattr(
        run_skyrl_tx, "start_server", lambda url, arguments, *_, **__: started.append(arguments)
    )
    monkeypatch.setattr(
        run_skyrl_tx, "train", lambda options, _, *, key, module: trained.append((options, key)) or 0
    )
    assert run_skyrl_tx.main(launched[1:]) == 0
    assert started == [("base_model=m",)]
    ((options, key),) = trained
    assert options["max_steps"] == "9" and options["eval_tasks"] == "a,b*" and key != "tml-old"
    assert options["skyrl_tx_url"] != OPTIONS["skyrl_tx_url"]
    monkeypatch.setattr(run_skyrl_tx, "find_server", lambda *_, **__: ServedModels(contexts={"org/name": 9}))
    assert run_skyrl_tx.main(launched[1:]) == 0
    assert trained[1][1] == "tml-old" and len(started) == 1


def test_resume_of_a_warm_start_runs_sft_on_the_server_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    run, server_directory = tmp_path / "run.sft", tmp_path / "run.server"
    options = ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://127.0.0.1:1", f"log_path={run}"]
    config = parse_as(SftConfig, [*options, f"data={tmp_path / 'chats.jsonl'}"])
    RunDirectory(path=run, checkpoint=None, delete_first=False).create(config)
    (run / "metrics.jsonl").write_text("")
    server_directory.mkdir()
    (server_directory / SERVER_FILE).write_text(json.dumps(["base_model=m"]))
    (server_directory / "api_key").write_text("tml-old\n")
    launched = command_line("resume", [str(run), "max_steps=9"])
    assert launched == ["scripts.run_skyrl_tx", f"resume={run}", "max_steps=9"]
    monkeypatch.setattr(run_skyrl_tx, "find_server", lambda *_, **__: ServedModels(contexts={"m": 9}))
    trained: list[tuple[str, str, str | None]] = []
    monkeypatch.setattr(
        run_skyrl_tx,
        "train",
        lambda options, _, *, key, module: trained.append((module, options["max_steps"], key)) or 0,
    )
    assert run_skyrl_tx.main(launched[1:]) == 0
    assert trained == [("src.sft", "9", "tml-old")]
