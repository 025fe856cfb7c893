"""Tests that a failed check of an endpoint refuses only runs whose options need the checked behaviour."""

import pytest

from src.cli.command_line import parse
from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.evaluate.probe.capabilities import Capabilities, Finding, require
from tests.fakes.run import OWN_SERVER


@pytest.mark.parametrize(
    ("check", "options"),
    [
        ("temperature", ["temperature=0.7"]),
        ("temperature", ["temperature=1", "eval_temperature=0"]),
        (
            "loads without optimizer",
            ["temperature=1", "load_checkpoint_path=tinker://r/weights/1", "load_optimizer=false"],
        ),
    ],
)
def test_a_failed_check_refuses_only_options_that_need_it(check: str, options: list[str]) -> None:
    finding = Finding(name=check, holds=False, is_needed=False, seen="ignored", seconds=0.1)
    without: TrainerConfig = parse([*OWN_SERVER, "tasks_dir=.", "temperature=1"])
    capabilities = Capabilities(
        url="http://h:1", model_name=without.model_name, max_context_length=None, findings=[finding]
    )
    require(capabilities, without)
    with pytest.raises(ConfigError, match=f"does not honour {options[-1]}"):
        require(capabilities, parse([*OWN_SERVER, "tasks_dir=.", *options]))
