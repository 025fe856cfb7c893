"""Tests the table of metrics, its generated page, and the names that runs log."""

from pathlib import Path

import pytest

from scripts.docs import metrics as metrics_page
from src.loop.run import Dependencies
from src.records.metrics_table import ALIASES, SECTIONS, Source, is_alias, metric_of, with_aliases
from src.records.tracking import recorded
from tests.fakes.backend import BanditBackend
from tests.fakes.run import FakeRun
from tests.fakes.trials import FakeTasks, task

DOCS = Path(__file__).resolve().parents[2] / "docs"
METRICS = [metric for section in SECTIONS.values() for metric in section]


class SmallRun(FakeRun):
    """Two steps of the real trainer with fake trials and `BanditBackend`, whose policy has four logits."""

    def __init__(self, path: Path) -> None:
        tasks = FakeTasks(train=[task(f"say-{number}") for number in range(4)], eval=[task("held")])
        super().__init__(path / "run", lambda config: Dependencies(source=tasks, backend=BanditBackend()))

    async def go(self, *options: str) -> None:
        await super().go("tasks_dir=t", "batch_size=2", "group_size=4", "learning_rate=2", *options)


def test_the_page_is_current():
    assert (DOCS / "metrics.md").read_text() == metrics_page.page(), "run python -m scripts.docs metrics"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("max_staleness=1",),
        ("stream_groups=true", "loss_reduction=sequence_mean"),
        ("tis=token", "kl_penalty_coef=0.1", "loss_fn=importance_sampling"),
        ("task_sampling=thompson", "dynamic_sampling=filter", "temperature=1"),
        ("zero_reward_on_non_stop=true", "apply_overlong_filtering=stop_reason", "num_substeps=2"),
    ],
    ids=lambda options: options[0].partition("=")[0] if options else "defaults",
)
async def test_every_logged_name_is_in_the_table(tmp_path, options):
    run = SmallRun(tmp_path)
    await run.go(*options)
    names = {name for line in run.lines("metrics.jsonl") for name in line} - {"step"}
    assert len(names) > 100
    assert {name for name in names if metric_of(name) is None} == set()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("trials/failed/sandbox", "trials/failed/<kind>"),
        ("test/trials/failed/sandbox", "trials/failed/<kind>"),
        ("env/all/turns", "env/all/turns"),
        ("env/all/tool_calls", "env/all/<name>"),
        ("test/pass_at_4_low", "test/<rate>_low"),
        ("test/env/retail/env_pass_at_4", "test/env/<domain>/<rate>_at_<k>"),
        ("test/env/retail/reward/total", "test/env/<domain>/reward/total"),
        ("test-retail/success_rate", "test/env/<domain>/positive_rate"),
        ("optim/grad_norm", "optim/<name>"),
        ("reward/retail/signal_ratio", "reward/<domain>/<signal>"),
    ],
)
def test_a_name_belongs_to_the_most_specific_entry(name, entry):
    metric = metric_of(name)
    assert metric is not None and metric.name == entry


def test_a_name_without_an_entry_is_unknown():
    assert metric_of("nothing/of_this_name") is None


def test_every_alias_names_a_metric():
    for alias in ALIASES:
        example = alias.metric.replace("<domain>", "retail").replace("<k>", "4")
        assert metric_of(example) is not None, alias


def test_no_metric_has_the_name_of_an_alias():
    assert [metric.name for metric in METRICS if is_alias(metric.name)] == []


def test_every_metric_has_one_entry():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


def test_aliases_change_no_metric():
    metrics = {"progress/batch": 3.0, "env/all/reward/total": 0.5, "time/total": 1.0}
    assert list(with_aliases(metrics))[:3] == list(metrics) and with_aliases(
        metrics
    ) | metrics == with_aliases(metrics)


@pytest.mark.seed_behaviour(24)
def test_aliases_have_the_values_of_their_metrics():
    metrics = {"progress/batch": 3.0, "env/all/reward/total": 0.5, "test/reward/avg_pass_at_4": 0.75}
    aliases = {"trainer/global_step": 3.0, "generation/avg_reward": 0.5, "eval/all/pass_at_4": 0.75}
    assert aliases.items() <= with_aliases(metrics).items()


def test_aliases_of_a_read_line_are_computed_again():
    before = with_aliases({"progress/batch": 3.0, "time/total": 1.0})
    assert list(with_aliases(before | {"late": 1.0})) == list(
        with_aliases({"progress/batch": 3.0, "time/total": 1.0, "late": 1.0})
    )


@pytest.mark.seed_behaviour(16)
def test_a_held_out_set_called_val_is_the_seeds_validation_set():
    names = with_aliases({"test/env/retail_val/positive_rate": 0.5, "test/env/retail_val/reward/total": 0.4})
    assert (names["eval-retail/success_rate"], names["eval-retail/average_reward"]) == (0.5, 0.4)


def test_all_tasks_are_no_domain():
    names = with_aliases({"test/env/all/reward/total": 1.0})
    assert not any(name.startswith(("test-all", "eval-all")) for name in names)


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.source is Source.RENAMED], ids=str)
def test_renamed_metrics_keep_their_old_names(alias):
    metric, old = (name.replace("<domain>", "retail") for name in (alias.metric, alias.name))
    assert with_aliases({metric: 1.0})[old] == 1.0


def test_a_line_of_an_earlier_release_is_read_by_the_new_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "test/floor": 0.25}\n')
    assert recorded(tmp_path / "metrics.jsonl", "test/noop_success") == {0: 0.25}
