"""Tests the upload of dumps by fsspec, to its in-memory file system."""

import json
import sys

import fsspec
import pytest

from src.cli.command_line import parse
from src.core.errors import ConfigError
from src.records.dumps import dump
from src.records.uploads import check_upload_url
from tests.trainer.test_episodes import EpisodesRun


@pytest.fixture
def memory():
    storage = fsspec.filesystem("memory")
    yield storage
    storage.store.clear()


@pytest.mark.seed_behaviour(29, 146)
async def test_evaluations_and_examples_of_a_run_are_uploaded(tmp_path, memory):
    bench = EpisodesRun(tmp_path)
    await bench.trained("max_steps=1", "eval_every=0", "temperature=1", "upload_url=memory://evals/")
    root = f"/evals/{bench.path.name}"
    for step in (0, 1):
        names = {path.rpartition("/")[2] for path in memory.ls(f"{root}/global_step_{step}", detail=False)}
        assert names == {"retail.jsonl", "airline.jsonl", "aggregated_results.jsonl"}
    aggregated = memory.cat(f"{root}/global_step_1/aggregated_results.jsonl")
    dumped = bench.path / "dumped_evals" / "global_step_1_evals" / "aggregated_results.jsonl"
    assert aggregated == dumped.read_bytes() and json.loads(aggregated)
    assert memory.exists(f"{root}/training_examples/step_1_examples.jsonl")


async def test_a_failed_upload_is_a_warning(tmp_path, caplog):
    shown = []
    await dump(lambda: [tmp_path / "missing.jsonl"], upload_to="memory://evals/run", say=shown.append)
    assert len(shown) == 1
    assert "the upload to memory://evals/run failed: FileNotFoundError" in shown[0]
    assert shown[0] in caplog.text


def test_storage_that_cannot_be_reached_is_refused_at_the_start(monkeypatch):
    check_upload_url("memory://evals")
    with pytest.raises(
        ConfigError, match="upload_url=nowhere://x: fsspec does not know the protocol nowhere"
    ):
        check_upload_url("nowhere://x")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"upload_url=s3://b: .*s3fs for s3://"):
        check_upload_url("s3://b")


def test_an_upload_needs_a_url_and_dumps():
    run = ["model_name=m", "tasks_dir=/tasks"]
    with pytest.raises(ConfigError, match="upload_url=/directory is not a URL; write s3://bucket/directory"):
        parse([*run, "upload_url=/directory"])
    with pytest.raises(ConfigError, match="upload_url needs dump_eval_results=true"):
        parse([*run, "upload_url=s3://b", "dump_eval_results=false"])
    with pytest.raises(ConfigError, match="export_path needs dump_eval_results=true; remove one of them"):
        parse([*run, "export_path=/dumps", "dump_eval_results=false"])
