"""Tests config=FILE.yaml: the options of a file, their precedence, and one-line errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import run_skyrl_tx
from src.cli.command_line import parse
from src.cli.config_file import with_config_files
from src.core.errors import ConfigError
from src.train import main
from tests.fakes.run import OWN_SERVER

TEXT = """
env: tau_bench
learning_rate: 2.0e-4
eval_tasks: [a, b*]
max_steps: null
remove_constant_reward_groups: true
environment_kwargs: {domain: toy_retail, num_workers: 2}
trainer:
  train_batch_size: 6
"""


def test_every_kind_of_value_is_read(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(TEXT)
    config = parse(with_config_files([*OWN_SERVER, f"config={tmp_path / 'run.yaml'}"]))
    assert (config.env, config.learning_rate, config.eval_tasks) == ("tau_bench", 2e-4, ["a", "b*"])
    assert config.max_steps is None and config.remove_constant_reward_groups and config.batch_size == 6
    assert config.environment_options == {"domain": "toy_retail", "num_workers": "2"}


def test_a_comma_in_an_item_of_a_list_does_not_split_the_item(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "env: tau_bench\neval_tasks: ['a,b', \"it's\", c]\nenvironment_kwargs: {system: 'x,y', n: 2}\n"
    )
    config = parse(with_config_files([*OWN_SERVER, f"config={tmp_path / 'run.yaml'}"]))
    assert config.eval_tasks == ["a,b", "it's", "c"]
    assert config.environment_options == {"system": "x,y", "n": "2"}


def test_arguments_take_precedence_over_the_file(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(TEXT)
    arguments = with_config_files(["seed=1", f"config={tmp_path / 'run.yaml'}", "learning_rate=1e-3"])
    assert arguments[-2:] == ["seed=1", "learning_rate=1e-3"]
    assert parse([*OWN_SERVER, *arguments]).learning_rate == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "FILE:3: the file is not YAML (expected"),
        ("- a\n", "config=FILE is not a mapping; write one `option: value` per line"),
        (None, "config=FILE cannot be read ("),
    ],
)
def test_a_mistake_in_the_file_gives_a_one_line_error(tmp_path: Path, capsys, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message.replace("FILE", str(path)))):
        with_config_files([f"config={path}"])
    assert main([f"config={path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("program", [main, run_skyrl_tx.main])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", "unknown option 'learning_rat'; did you mean learning_rate?"),
        ("min_p: 1\n", "min_p cannot be honoured: "),
    ],
)
def test_an_unknown_option_of_a_file_is_reported_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program, text: str, message: str
):
    (tmp_path / "run.yaml").write_text(text)
    assert program(["model_name=m", f"config={tmp_path / 'run.yaml'}"]) == 2
    assert f": config={tmp_path / 'run.yaml'}: {message}" in capsys.readouterr().err
