"""The hardware table in docs/devices.md is the output of `python -m scripts.hardware`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx_server.config.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "devices.md").read_text()


@pytest.mark.seed_behaviour(82, 128)
def test_the_hardware_table_is_the_output_of_the_script() -> None:
    """The script runs in its own process, because it makes the server assume a GPU."""
    command = [sys.executable, "-m", "scripts.hardware"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert printed.count("\n") > 10 and printed in PAGE


def test_every_command_of_the_table_is_valid() -> None:
    commands = re.findall(r"^\| `scripts/start_skyrl_tx.sh (\S+) (\d+) ?(.*?)`", PAGE, re.MULTILINE)
    assert len(commands) > 10
    for model, tensor, options in commands:
        assert parse([f"base_model={model}", f"tensor_parallel={tensor}", *options.split()]).alias == model
