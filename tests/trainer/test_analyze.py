"""Runs `python -m src.analyze` on runs and evaluations of the real trainer with scripted policies."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from src.analyze.__main__ import main
from src.cli.command_line import parse_as
from src.cli.console import Display
from src.core.trajectory import Turn
from src.envs.registry import open_task_source
from src.evaluate.config import EvaluateConfig
from src.evaluate.run import PolicyAndTasks, run
from src.policy.chat import Chat, load_chat
from src.policy.sampling_policy import SampleRequest
from tests.fakes.policy import FakePolicy
from tests.trainer.test_episodes import EpisodesRun

MODEL = Path(__file__).resolve().parents[2] / "datasets" / "toy_retail" / "model"
CALL = '<tool_call>{"name": "get_order", "arguments": {"order": "no such id"}}</tool_call>'


class Clerk:
    """A policy that requests an order that does not exist and then answers with text until the user
    ends the conversation.

    Every fifth completion is text, even if no call has been made.
    """

    version = 0

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._num_calls = 0

    async def sample(self, request: SampleRequest) -> Turn:
        text = self._chat.tokenizer.decode(
            request.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        has_called = "there is no order" in text
        self._num_calls += 1
        reply = "It is done." if has_called or self._num_calls % 5 == 0 else CALL
        return await FakePolicy(self._chat, [reply]).sample(request)


async def evaluate_clerk(directory: Path, *options: str) -> None:
    """Evaluate the policy `Clerk` on tasks of toy_retail."""
    chat = load_chat(str(MODEL))
    argv = ["env=tau_bench", "environment_kwargs=domain=toy_retail", "test_data=shop=toy_retail:test"]
    argv += ["model_name=m", "backend=skyrl-tx", "skyrl_tx_url=http://h:1", "n_samples=3", "max_tokens=60"]
    argv += ["context_limit=2048", f"log_path={directory}", "use_native_tool_calling=true", *options]
    config = parse_as(EvaluateConfig, argv)

    @asynccontextmanager
    async def opened(config: EvaluateConfig, checkpoint: str | None):
        yield PolicyAndTasks(policy=Clerk(chat), source=open_task_source(config.environment, chat))

    await run(config, Display(Console(file=io.StringIO())), open_policy_and_tasks=opened)


def rows(text: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table below a heading, each as a dict from column name to cell."""
    lines = text.partition(heading)[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = takewhile(lambda line: line.startswith("|"), lines[start:])
    header, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(header, line, strict=True)) for line in body]


def analyze(*arguments: str, write_to: Path) -> str:
    assert main([*arguments, f"write_to={write_to}"]) == 0
    return write_to.read_text()


@pytest.mark.seed_behaviour(148)
async def test_a_run_is_compared_from_its_first_to_its_last_step(tmp_path: Path) -> None:
    bench = EpisodesRun(tmp_path)
    await bench.trained("n_epochs=6", "eval_every=3", "temperature=1")
    text = analyze(f"runs={bench.path}", write_to=tmp_path / "experiments.md")
    before, after = (
        bench.lines(f"dumped_evals/global_step_{step}_evals/aggregated_results.jsonl")[0] for step in (0, 6)
    )
    table = rows(text, "### Held-out tasks, step 0 → 6")
    assert [row["environment"] for row in table] == ["all tasks", "airline", "retail"]
    for row in table[1:]:
        key = f"eval/{row['environment']}/pass_at_3"
        assert row["pass@3"] == f"{before[key]:.1%} → {after[key]:.1%}"
        turns = f"test/env/{row['environment']}/turns"
        assert row["avg turns"] == f"{before[turns]:.1f} → {after[turns]:.1f}"
        assert "points [" in row["difference"] and row["tasks"] == "1" and row["trials"] == "4"
    variances = [line["reward/retail/variance_per_prompt"] for line in bench.lines("metrics.jsonl")[1:]]
    [signal] = [row for row in rows(text, "### Training signal") if row["environment"] == "retail"]
    assert signal["avg variance"] == f"{sum(variances) / 6:.4f}" and signal["steps"] == "6"
    assert signal["steps with signal"] == f"{sum(v > 0 for v in variances) / 6:.1%}"


@pytest.mark.seed_behaviour(150)
async def test_failing_tasks_are_listed_with_patterns_and_calls(tmp_path: Path) -> None:
    await evaluate_clerk(tmp_path / "evaluation", "tasks=*-test-*")
    text = analyze(f"runs={tmp_path / 'evaluation'}", write_to=tmp_path / "e.md")
    dumped = [
        json.loads(line)
        for line in (tmp_path / "evaluation/dumped_evals/global_step_0_evals/shop.jsonl")
        .read_text()
        .splitlines()
    ]
    [row] = rows(text, "### Held-out tasks, step 0")
    calls = [record["env_extras"]["tool_calls"] for record in dumped]
    failed = [count for count, record in zip(calls, dumped, strict=True) if record["score"][-1] < 1]
    assert (row["tasks"], row["trials"]) == ("20", "60")
    assert row["avg tool calls"] == f"{sum(calls) / 60:.1f}" and 0 < sum(calls) < 120
    patterns = {row["pattern"]: int(row["shop"]) for row in rows(text, "### Failed trials by pattern")}
    assert patterns == {
        "failed trials": len(failed),
        "not found": sum(count > 0 for count in failed),
        "nothing done": failed.count(0.0),
    }
    tasks = rows(text, "### Tasks that fail")
    assert tasks and all(row["solved"].endswith("/3") for row in tasks)
    assert any("get_order" in row["a failed trial"] for row in tasks)
    assert any("Error: there is no order no such id" in row["a failed trial"] for row in tasks)


async def test_the_conversations_of_a_task_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await evaluate_clerk(tmp_path / "evaluation", "tasks=price-test-1,return-test-1")
    argv = [f"runs={tmp_path / 'evaluation'}", f"write_to={tmp_path / 'e.md'}"]
    assert main([*argv, "task=price-*"]) == 0
    printed = capsys.readouterr().out
    headings = [line for line in printed.splitlines() if line.startswith("### ")]
    assert len(headings) == 3 and all(line.startswith("### price-test-1, step 0: ") for line in headings)
    assert '-> get_order({"order": "no such id"})' in printed and "[tool get_order]" in printed
    assert "(not found)" in printed and not (tmp_path / "e.md").exists()
    assert main([*argv, "task=refund"]) == 2
    error = capsys.readouterr().err
    assert "task=refund is not in step 0 of evaluation; its tasks: price-test-1, return-test-1" in error


@pytest.mark.seed_behaviour(135, 152)
async def test_two_runs_are_compared_in_pairs(tmp_path: Path) -> None:
    directories = []
    for name, options in {"tinker": ("seed=1",), "skyrl-tx": ("seed=2", "learning_rate=1")}.items():
        bench = EpisodesRun(tmp_path / name)
        await bench.trained("n_epochs=4", "eval_every=0", "temperature=1", *options)
        directories.append(bench.path.rename(bench.path.with_name(name)))
    text = analyze(f"runs={directories[0]},{directories[1]}", write_to=tmp_path / "experiments.md")
    comparison = text.partition("## tinker, skyrl-tx")[2]
    assert [row["run"] for row in rows(comparison, "\n")] == ["tinker"] * 3 + ["skyrl-tx"] * 3
    assert "`seed=1` and `2`; `learning_rate=2.0` and `1.0`" in comparison
    [everything, *_] = rows(comparison, "paired by task:")
    assert (everything["environment"], everything["tasks"]) == ("all tasks", "2")
    losses = {row["metric"]: row for row in rows(comparison, "paired by step:")}
    assert losses["`optim/loss`"]["steps"] == "4"
    means = [
        sum(json.loads(line)["env/all/reward/total"] for line in lines[1:]) / 4
        for lines in ((directory / "metrics.jsonl").read_text().splitlines() for directory in directories)
    ]
    row = losses["`env/all/reward/total`"]
    assert [row["tinker"], row["skyrl-tx"]] == [f"{mean:.4g}" for mean in means]


@pytest.mark.seed_behaviour(152)
async def test_a_repeated_analysis_replaces_its_section(tmp_path: Path) -> None:
    path = tmp_path / "experiments.md"
    path.write_text("# Experiments\n\nOur notes.\n")
    await evaluate_clerk(tmp_path / "first", "n_samples=1", "tasks=*1")
    for _ in range(2):
        text = analyze(f"runs={tmp_path / 'first'}", write_to=path)
        assert text.startswith("# Experiments\n\nOur notes.\n\n<!-- analysis: first -->\n")
        assert text.count("## first") == 1


def skyrl_dump(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.seed_behaviour(146)
def test_dumps_of_skyrl_can_be_analyzed(tmp_path: Path) -> None:
    """The dumps have token scores and task keys, but no conversations."""
    response = '<tool_call>{"name": "search"}</tool_call><|im_end|><|im_start|>assistant\ndone'
    for step, scores in {0: (0.0, 0.0, 0.0, 1.0), 10: (1.0, 0.0, 1.0, 1.0)}.items():
        records = [
            {
                "input_prompt": "find it",
                "output_response": response,
                "score": [0.0, 0.0, score],
                "stop_reason": "stop",
                "env_extras": {"task_key": "t", "data_source": "web"},
            }
            for score in scores
        ]
        skyrl_dump(tmp_path / "run" / f"global_step_{step}" / "web.jsonl", records)
    text = analyze(f"runs={tmp_path / 'run'}", write_to=tmp_path / "e.md")
    [row] = rows(text, "### Held-out tasks, step 0 → 10")
    assert (row["pass@1"], row["pass@3"]) == ("25.0% → 75.0%", "75.0% → 100.0%")
    assert (row["avg turns"], row["avg tool calls"]) == ("2.0 → 2.0", "1.0 → 1.0")
    patterns = {row["pattern"]: row["web"] for row in rows(text, "### Failed trials by pattern")}
    assert patterns == {"failed trials": "3 → 1", "false completion": "3 → 1"}


def test_a_tool_name_with_a_line_break_does_not_break_a_table(tmp_path: Path) -> None:
    call = {"function": {"name": "get\norder", "arguments": {}}}
    conversation = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    record = {"score": 0.0, "env_extras": {"task_key": "t"}, "conversation": conversation}
    skyrl_dump(tmp_path / "run" / "global_step_0" / "web.jsonl", [record])
    text = analyze(f"runs={tmp_path / 'run'}", write_to=tmp_path / "e.md")
    [row] = rows(text, "### Tasks that fail")
    assert row["a failed trial"] == "`–`: get order"


def test_former_names_of_options_are_no_difference(tmp_path: Path) -> None:
    for name, options in {"old": {"stop_timeout_sec": 5.0}, "new": {"stop_timeout_s": 5.0}}.items():
        record = {"score": 0.0, "env_extras": {"task_key": "t"}}
        skyrl_dump(tmp_path / name / "global_step_0" / "web.jsonl", [record])
        (tmp_path / name / "config.json").write_text(json.dumps(options))
    text = analyze(f"runs={tmp_path / 'old'},{tmp_path / 'new'}", write_to=tmp_path / "e.md")
    assert "The options are equal" in text


def test_the_options_of_a_directory_with_only_dumps_are_unknown(tmp_path: Path) -> None:
    for name in ("first", "second"):
        record = {"score": 0.0, "env_extras": {"task_key": "t"}}
        skyrl_dump(tmp_path / name / "global_step_0" / "web.jsonl", [record])
    (tmp_path / "first" / "config.json").write_text('{"seed": 1}')
    text = analyze(f"runs={tmp_path / 'first'},{tmp_path / 'second'}", write_to=tmp_path / "e.md")
    assert "The options of second are unknown" in text and "are equal" not in text


def test_a_pair_of_runs_compares_only_common_tasks(tmp_path: Path) -> None:
    runs = {
        "first": {"common": (0.0, 0.0, 1.0), "first only": (1.0, 1.0, 1.0)},
        "second": {"common": (0.0, 0.0, 0.0), "second only": (1.0, 1.0, 1.0)},
    }
    for name, scores_by_task in runs.items():
        records = [
            {
                "input_prompt": "find it",
                "output_response": "done",
                "score": [score],
                "stop_reason": "stop",
                "env_extras": {"task_key": task, "data_source": "web"},
            }
            for task, scores in scores_by_task.items()
            for score in scores
        ]
        skyrl_dump(tmp_path / name / "global_step_0" / "web.jsonl", records)
    text = analyze(f"runs={tmp_path / 'first'},{tmp_path / 'second'}", write_to=tmp_path / "e.md")
    comparison = text.partition("## first, second")[2]
    [row] = rows(comparison, "paired by task:")
    assert (row["tasks"], row["first"], row["second"]) == ("1", "33.3%", "0.0%")
    assert row["pass@3"] == "100.0% → 0.0%"
    assert rows(comparison, "\n")[0]["steps with signal"] == "–"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["runs={}/none"], "has neither dumped_evals/ nor metrics.jsonl; give the directory of a run with"),
        (
            ["runs={}/run", "last_step=3"],
            "last_step=3 has no dumped evaluation in run; steps with a dumped evaluation: 0",
        ),
        (["runs={}/run,{}/x/run"], "two runs are called run; rename one of their directories"),
        (["runs={}/run,{}/run"], "runs= names a directory twice; remove one of them"),
        (["runs={}/damaged"], "web.jsonl, line 1: score"),
        (["runs={}/run", "first_step=4", "last_step=2"], "first_step=4 is after last_step=2; exchange them"),
        ([], "missing: runs"),
    ],
)
def test_a_mistake_gives_a_one_line_error(
    tmp_path: Path, arguments: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, score in {"run": 1.0, "x/run": 1.0, "damaged": "good"}.items():
        skyrl_dump(tmp_path / name / "global_step_0" / "web.jsonl", [{"score": score, "input_prompt": "p"}])
    argv = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    assert main([*argv, f"write_to={tmp_path / 'e.md'}"]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and line in error


def test_a_file_that_is_not_text_is_refused(tmp_path, capsys):
    directory = tmp_path / "run" / "dumped_evals" / "global_step_1_evals"
    directory.mkdir(parents=True)
    (directory / "a.jsonl").write_text('{"score": 1}\n')
    (tmp_path / "e.md").write_bytes(b"\xff")
    assert main([f"runs={tmp_path / 'run'}", f"write_to={tmp_path / 'e.md'}"]) == 2
    message = f"error: write_to={tmp_path / 'e.md'} is not UTF-8 text; give another file\n"
    assert capsys.readouterr().err == message
