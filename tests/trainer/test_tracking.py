import gc
import json
import math
import subprocess
import sys
import types
from typing import Literal

import pytest
from pydantic import BaseModel

from src.core.errors import ConfigError
from src.records.options import TrackingOptions
from src.records.tracking import RunLog, open_run_log, project_name, recorded
from tests.fakes.wandb_module import FakeWandb

NO_TRACKING = TrackingOptions(wandb_project=None, trackio_project=None)
WANDB = TrackingOptions(wandb_project="p", trackio_project=None)
TRACKIO = TrackingOptions(wandb_project=None, trackio_project="p")


def log(path, steps, *, repeat_from=0):
    with open_run_log(path, NO_TRACKING, name="n", config={}) as run_log:
        run_log.forget_from(repeat_from)
        for step in steps:
            run_log.log(step, {"reward": step / 10})


@pytest.mark.seed_behaviour(22)
def test_each_step_is_one_object(tmp_path):
    log(tmp_path, [0, 1])
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 0, "reward": 0.0},
        {"step": 1, "reward": 0.1},
    ]
    assert recorded(tmp_path / "metrics.jsonl", "reward") == {0: 0.0, 1: 0.1}
    assert recorded(tmp_path / "metrics.jsonl", "other") == {}


def test_a_number_that_cannot_be_read_again_is_written_as_null(tmp_path):
    with open_run_log(tmp_path, NO_TRACKING, name="n", config={}) as run_log:
        run_log.log(0, {"a": 1e305, "b": 1e299})
    assert recorded(tmp_path / "metrics.jsonl", "b") == {0: 1e299}


def test_nan_and_infinity_are_written_as_null(tmp_path):
    with open_run_log(tmp_path, NO_TRACKING, name="n", config={}) as run_log:
        run_log.log(0, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": None, "b": None, "c": 1.0}


@pytest.mark.seed_behaviour(23, 26)
def test_steps_that_are_repeated_are_logged_once(tmp_path):
    log(tmp_path, [0, 1, 2, 3])
    log(tmp_path, [2, 3], repeat_from=2)
    assert list(recorded(tmp_path / "metrics.jsonl", "reward")) == [0, 1, 2, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_line_can_be_completed(tmp_path):
    with open_run_log(tmp_path, NO_TRACKING, name="n", config={}) as run_log:
        run_log.log(0, {"reward": 0.5})
        run_log.log(1, {"reward": 0.25, "odd": math.nan})
        run_log.amend(1, {"test/reward": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.25, "odd": None, "test/reward": 1.0}]


def test_a_line_cut_by_a_crash_is_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward": 1.0}\n{"step": 1, "rew')
    RunLog(path).forget_from(5)
    assert path.read_text() == '{"step": 0, "reward": 1.0}\n'


OFFLINE = """
import sys
from pathlib import Path
from src.records.tracking import TrackingOptions, open_run_log
settings = TrackingOptions(wandb_project="p", trackio_project=None)
for start in (0, 2):
    with open_run_log(Path(sys.argv[1]), settings, name="my-run", config={"seed": 1}) as log:
        log.forget_from(start)
        log.log(start, {"reward": 0.5})
        log.log(start + 1, {"reward": 0.75})
"""


@pytest.mark.seed_behaviour(26, 95)
def test_offline_wandb_continues_a_run_under_its_id(tmp_path):
    environment = {"WANDB_MODE": "offline", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert files and all(b"reward" in path.read_bytes() for path in files)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_wandb_receives_a_step_once_with_its_evaluation(tmp_path, monkeypatch):
    """W&B ignores metrics for a step that it already has."""
    fake = FakeWandb()
    fake.released.set()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with open_run_log(tmp_path, WANDB, name="n", config={}) as run_log:
        run_log.log(1, {"reward": 0.5})
        run_log.log(2, {"reward": 0.25, "odd": math.nan}, is_whole=False)
        run_log.amend(2, {"test/reward": 1.0})
    assert fake.logged == [(1, {"reward": 0.5}), (2, {"reward": 0.25, "test/reward": 1.0})]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class WandbSettings(BaseModel):
    mode: Literal["offline"]


def test_the_wandb_id_is_written_before_the_run_starts(tmp_path, monkeypatch):
    fake = FakeWandb(is_down=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with (
            pytest.raises(ConfigError, match="wandb: no network; log in"),
            open_run_log(tmp_path, WANDB, name="n", config={}),
        ):
            pass
    assert len(set(fake.ids)) == 1 and fake.ids[0]


def test_an_invalid_setting_of_wandb_gives_a_one_line_error(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(fake, "Settings", lambda **options: WandbSettings.model_validate({"mode": "x"}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with (
        pytest.raises(ConfigError, match=r"^wandb: setting mode: Input should be 'offline'; log in with .*$"),
        open_run_log(tmp_path, WANDB, name="n", config={}),
    ):
        pass


def test_an_upload_that_never_ends_does_not_block_the_exit(tmp_path, monkeypatch, caplog):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("src.records.tracking.FINISH_S", 0.05)
    with open_run_log(tmp_path, WANDB, name="n", config={}):
        pass
    assert "wandb did not finish within 0.05 s" in caplog.text
    fake.released.set()


class FakeTrackio(types.ModuleType):
    """Replaces `trackio` 0.43, where project and name identify a run."""

    def __init__(self):
        super().__init__("trackio")
        self.runs = {}
        self.finished = 0

    def init(self, *, project, name, config, resume, embed):
        assert resume == "allow" and not embed
        print("* Trackio project initialized")
        self.lines = self.runs.setdefault((project, name), [])
        return self

    def log(self, metrics, step=None):
        self.lines.append((step, metrics))

    def finish(self):
        self.finished += 1


def test_trackio_continues_the_run_of_the_directory(tmp_path, monkeypatch, capsys):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for start, name in ((0, "monday"), (1, "tuesday")):
        with open_run_log(tmp_path, TRACKIO, name=name, config={}) as run_log:
            run_log.log(start, {"reward": 0.5, "odd": math.nan})
        assert fake.finished == start + 1
    assert fake.runs == {("p", "monday"): [(0, {"reward": 0.5}), (1, {"reward": 0.5})]}
    assert capsys.readouterr().out == ""


def test_trackio_that_is_not_installed_gives_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with (
        pytest.raises(ConfigError, match=r"run scripts/setup\.sh trackio"),
        open_run_log(tmp_path, TRACKIO, name="n", config={}),
    ):
        pass


@pytest.mark.parametrize(
    ("is_judged", "project", "expected"),
    [
        (True, "tau", "tau_with_taxonomy_feedback"),
        (True, "tau_with_taxonomy_feedback", "tau_with_taxonomy_feedback"),
        (False, "tau", "tau"),
    ],
)
@pytest.mark.seed_behaviour(28)
def test_judged_runs_have_a_project_of_their_own(is_judged, project, expected):
    assert project_name(project, is_judged=is_judged) == expected


def test_renamed_metrics_are_announced_once(tmp_path, caplog):
    caplog.set_level("INFO")
    with open_run_log(tmp_path, NO_TRACKING, name="n", config={}) as run_log:
        for step in range(2):
            run_log.log(step, {"batch/sequences": 1.0})
    [notice] = [text for text in caplog.messages if "metrics were renamed" in text]
    assert len(notice) < 100 and "docs/metrics.md" in notice


@pytest.mark.seed_behaviour(27)
def test_only_a_closed_log_finishes_its_runs(tmp_path, monkeypatch):
    fake = FakeTrackio()
    dropped = RunLog(tmp_path / "metrics.jsonl", trackio_run=fake)
    del dropped
    gc.collect()
    assert fake.finished == 0
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with open_run_log(tmp_path, TRACKIO, name="n", config={}):
        pass
    assert fake.finished == 1
