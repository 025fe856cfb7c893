"""Tests the result of a run, as `src.loop.run.run` returns it and as `read_result` reads it from a
directory."""

from pathlib import Path

import pytest

from src.core.errors import ConfigError, ServerLost
from src.records.journal import RunState
from src.train import read_result
from tests.trainer.test_run import Bench


async def test_the_result_of_a_run_equals_that_of_its_directory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    result = await bench.go("eval_group_size=2", "save_every=1")
    assert result == read_result(bench.path)
    assert (result.directory, result.end, result.error, result.num_steps) == (
        bench.path,
        RunState.DONE,
        "",
        2,
    )
    assert result.metrics["step"] == 2 and result.metrics["optim/lr"] == 2
    lines = bench.lines("metrics.jsonl")
    rates = [line["test/env/all/success"] for line in (lines[0], lines[-1])]
    assert [result.held_out.before, result.held_out.after] == rates
    assert [checkpoint.batch for checkpoint in result.checkpoints] == [1, 2]
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.state_path.startswith("tinker://")


async def test_the_result_of_a_failed_run_has_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)

    def fail(*arguments: object) -> None:
        raise ServerLost("the server is gone")

    monkeypatch.setattr(bench.backend.training_client, "optim_step", fail)
    with pytest.raises(ServerLost):
        await bench.go("eval_before_train=false", "reconnect_timeout_s=0")
    result = read_result(bench.path)
    assert result.end is RunState.SERVER_LOST and "the server is gone" in result.error
    assert (result.num_steps, result.metrics, result.last_checkpoint) == (0, {}, None)
    assert result.held_out.after is None


async def test_without_an_ended_event_the_result_has_no_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.go("max_steps=1")
    journal = bench.path / "journal.jsonl"
    *lines, last = journal.read_text().splitlines(keepends=True)
    assert '"ended"' in last
    journal.write_text("".join(lines))
    assert read_result(bench.path).end is None


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "config.json").write_text('{"evaluated": "m"}')
    with pytest.raises(ConfigError, match="is the directory of an evaluation"):
        read_result(tmp_path / "evaluation")
    with pytest.raises(ConfigError, match=r"has no config\.json; give the directory of a run"):
        read_result(tmp_path)


def test_an_unknown_end_state_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "journal.jsonl").write_text('{"event": "ended", "state": "happy"}\n')
    with pytest.raises(ConfigError, match=r"journal\.jsonl, line 1: "):
        read_result(tmp_path)
