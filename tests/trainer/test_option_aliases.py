import chz
import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig
from src.core.option_aliases import OPTION_ALIASES, present_argument, present_options

BASE = ["model_name=m", "tasks_dir=t"]
FORMER_NAMES = [name for name in OPTION_ALIASES if "=" not in name]


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_former_name_sets_the_present_option(name):
    assert getattr(parse([*BASE, f"{name}=7"]), OPTION_ALIASES[name]) == 7


def test_a_former_value_sets_the_present_value():
    assert parse([*BASE, "task_sampling=signal"]).task_sampling == "thompson"


def test_a_former_name_prints_a_one_line_notice(capsys):
    parse([*BASE, "stop_timeout_sec=7"])
    notice = "note: write stop_timeout_s=7 instead of stop_timeout_sec=7; the former name will be removed\n"
    assert capsys.readouterr().err == notice


def test_present_names_are_options_and_former_ones_are_not():
    fields = chz.chz_fields(TrainerConfig)
    assert {new.partition("=")[0] for new in OPTION_ALIASES.values()} <= set(fields)
    assert not set(FORMER_NAMES) & set(fields)


def test_present_names_pass_unchanged():
    assert [present_argument(new) for new in OPTION_ALIASES.values()] == list(OPTION_ALIASES.values())


def test_options_of_an_earlier_release_are_read():
    earlier = {"task_sampling": "signal", "max_length_stops": 3, "seed": 1}
    assert present_options(earlier) == {
        "task_sampling": "thompson",
        "max_consecutive_truncations": 3,
        "seed": 1,
    }
