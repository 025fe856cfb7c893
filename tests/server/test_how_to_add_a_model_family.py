"""Run the code blocks of docs/how-to/add-a-model-family.md and compare the family with Hugging Face's
logits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.families import qwen3
from skyrl_tx_server.model.families.table import FAMILIES as TABLE
from skyrl_tx_server.model.families.table import stacks_of
from tests.server.test_families import FAMILIES, difference

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-model-family.md").read_text()
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
FIXTURE = "qwen3_sliding_window"


def test_the_family_of_the_page_equals_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load_model_config(FAMILIES / FIXTURE), model_type="my_model", sliding_windows=())
    # the code of the page replaces this entry, and monkeypatch removes it after the test
    monkeypatch.setitem(TABLE, "my_model", qwen3.FAMILY)
    exec(compile(CODE, "add-a-model-family.md", "exec"), {})
    assert [stack.attention.sliding_window for stack in stacks_of(config)] == [None, 24]
    assert TABLE["my_model"].weights(config) == qwen3.FAMILY.weights(config)
    assert difference(config, FIXTURE) <= 1e-4
