"""Tests the quick starts of `./run_skyrl_tx.sh`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.bench import quickstart as bench
from scripts.quick_starts import ARITHMETIC, QUICKSTART_OPTIONS, QUICKSTARTS
from scripts.quickstart import make_arithmetic
from scripts.quickstart.demonstrations import write_chats
from scripts.run_skyrl_tx import chosen_quick_start, missing_package
from skyrl_tx_server.files.model_source import PACKAGED
from src.cli.command_line import parse, parse_as
from src.core.errors import ConfigError
from src.sft.config import SftConfig

URL = "http://localhost:1"


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_every_quick_start_is_a_valid_run(name: str) -> None:
    options = QUICKSTART_OPTIONS | QUICKSTARTS[name].options | {"model_name": "local/m"}
    base = ("backend=skyrl-tx", f"skyrl_tx_url={URL}", "log_path=runs/a")
    parse([*base, *(f"{option}={value}" for option, value in options.items())])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "terminal"),
        ({"env": "tau_bench"}, "tau_bench"),
        ({"quickstart": "tau_bench"}, "tau_bench"),
        ({"quickstart": "arithmetic"}, "arithmetic"),
    ],
)
def test_a_quick_start_is_chosen_by_name_or_environment(given: dict[str, str], name: str) -> None:
    assert chosen_quick_start(given) is QUICKSTARTS[name]


def test_an_unknown_quick_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quickstart=math is none of terminal, tau_bench, arithmetic$"):
        chosen_quick_start({"quickstart": "math"})


def test_the_warm_start_and_its_rl_have_valid_options() -> None:
    for name, chosen in QUICKSTARTS.items():
        if (warm_start := chosen.warm_start) is None:
            continue
        run = {"model_name": "local/m", "log_path": "runs/a", "backend": "skyrl-tx", "skyrl_tx_url": URL}
        rl_options = QUICKSTART_OPTIONS | chosen.options | warm_start.rl_options | run
        config = parse([f"{option}={value}" for option, value in rl_options.items()])
        sft_options = {"data": "chats.jsonl", "lora_rank": rl_options["lora_rank"]} | warm_start.options | run
        sft_config = parse_as(SftConfig, [f"{option}={value}" for option, value in sft_options.items()])
        assert f"max_lora_rank={config.lora_rank}" in warm_start.server, name
        assert warm_start.num_demonstrations * (1 - sft_config.eval_split) > sft_config.batch_size


def test_the_chats_of_the_warm_start_are_reproducible(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_chats(tmp_path / name, 20)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    chats = [json.loads(line)["messages"] for line in (tmp_path / "first").read_text().splitlines()]
    assert len(chats) == 20
    assert {message["role"] for chat in chats for message in chat} == {"user", "assistant"}
    assert all(chat[-1]["role"] == "assistant" for chat in chats)


def test_the_rl_after_a_warm_start_has_more_tasks(tmp_path: Path) -> None:
    chosen = QUICKSTARTS["terminal"]
    assert chosen.warm_start is not None
    chosen.warm_start.write_tasks(tmp_path)
    written = {directory.name for directory in tmp_path.iterdir()}
    assert written > {directory.name for directory in Path(chosen.options["tasks_dir"]).iterdir()}
    assert not written & {directory.name for directory in Path(chosen.options["eval_tasks"]).iterdir()}
    assert (tmp_path / "write-12" / "tests" / "test.sh").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("model", "has_warm_start", "message"),
    [
        (
            QUICKSTARTS["terminal"].base_model,
            False,
            "a small model learns terminal tasks by GRPO on this machine; four to seven minutes on two CPU "
            "cores",
        ),
        ("a/model", True, "a/model learns terminal tasks by GRPO after 600 demonstrations on this machine"),
        ("a/model", False, "a/model learns terminal tasks by GRPO on this machine"),
    ],
)
def test_the_first_line_names_the_model(model: str, has_warm_start: bool, message: str) -> None:
    chosen = QUICKSTARTS["terminal"]
    assert chosen.message(model, chosen.warm_start if has_warm_start else None) == message


def test_only_a_missing_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package("Qwen/Qwen3-4B") is None
    monkeypatch.setitem(PACKAGED, "a-model", ("no_such_package", "a.gguf", "scripts/setup.sh a-model"))
    assert missing_package("a-model") == ["scripts/setup.sh", "a-model"]
    monkeypatch.setitem(PACKAGED, "a-model", ("json", "a.gguf", "scripts/setup.sh a-model"))
    assert missing_package("a-model") is None


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text().splitlines()]


def test_the_committed_problems_are_those_of_the_script(tmp_path: Path) -> None:
    make_arithmetic.main(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_text() == (ARITHMETIC / name).read_text()


def test_held_out_stories_do_not_occur_in_training() -> None:
    stories = {
        name: {re.sub(r"\d+|[A-Z]\w+", "", row["question"]) for row in rows(name)}
        for name in ("train", "heldout")
    }
    assert not stories["train"] & stories["heldout"]


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_the_answers_of_the_problems_are_right(name: str) -> None:
    for row in rows(name):
        a, sign, b = row["question"].rpartition("What is ")[2].removesuffix("?").split()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_the_benchmark_reports_a_run_that_a_signal_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([-9, 0])

    def run(seed: str, *_: object) -> bench.Run:
        return bench.Run(seed=seed, status=next(statuses), wall_s=1.0, peak_mib=1.0, curve=[])

    monkeypatch.setattr(bench, "run", run)
    assert bench.main(["seeds=0,1"]) == 1
