"""Sandboxes for the security tests, and how to run these tests as an ordinary user."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from src.envs.sandbox.bubblewrap import Bubblewrap
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.rootfs import build_rootfs
from src.envs.sandbox.run_directory import run_directory

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "65534"
PYTHON = "/usr/bin/python3"  # inside the sandbox

# Python itself may read the interpreter and the packages, wherever they lie. What it starts has no capability.
_PYTEST_WITHOUT_CAPABILITIES = """
import ctypes, sys
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
assert ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) == 0
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@asynccontextmanager
async def sandbox(*, network: bool = False, limits: SandboxLimits | None = None) -> AsyncIterator[Bubblewrap]:
    run = run_directory(f"security-{os.getpid()}")
    running = await Bubblewrap.start(
        run / secrets.token_hex(4),
        skeleton=build_rootfs(run),
        hostname="sandbox",
        share_network=network,
        limits=limits or SandboxLimits(),
    )
    try:
        yield running
    finally:
        await running.stop()


def run_tests_as_nobody(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest as an ordinary user; only root can."""
    became = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    became += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"]
    command = [
        *became,
        sys.executable,
        "-c",
        _PYTEST_WITHOUT_CAPABILITIES,
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False
    )
