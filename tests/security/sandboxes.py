"""Sandboxes for tests, and a function that runs tests as an ordinary user."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from src.envs.sandbox.bubblewrap import Bubblewrap
from src.envs.sandbox.environment import SandboxEnvironment
from src.envs.sandbox.resource_limits import SandboxLimits
from src.envs.sandbox.rootfs import build_rootfs
from src.envs.sandbox.sandbox_directory import sandbox_directory

LABEL = f"security-{os.getpid()}"
ROOT = Path(__file__).resolve().parents[2]
NOBODY = "65534"
PYTHON = "/usr/bin/python3"  # inside the sandbox

# pytest keeps the capability CAP_DAC_READ_SEARCH, because the interpreter and the packages may be readable
# only by root. The ambient set is cleared, so that programs that pytest starts have no capability.
_PYTEST_WITHOUT_CAPABILITIES = """
import ctypes, sys
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
assert ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) == 0
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@asynccontextmanager
async def sandbox(*, network: bool = False, limits: SandboxLimits | None = None) -> AsyncIterator[Bubblewrap]:
    """Start a sandbox, and stop it at the end."""
    run = sandbox_directory(LABEL)
    bubblewrap = await Bubblewrap.start(
        run / secrets.token_hex(4),
        skeleton=build_rootfs(run),
        hostname="sandbox",
        share_network=network,
        limits=limits or SandboxLimits(),
    )
    try:
        yield bubblewrap
    finally:
        await bubblewrap.stop()


@asynccontextmanager
async def environment(
    tmp_path: Path, dockerfile: str = "FROM debian\nWORKDIR /app\n", **config: object
) -> AsyncIterator[SandboxEnvironment]:
    """Start the sandbox of a task whose `[environment]` options are `config`, and stop it at the end."""
    directory = tmp_path / "environment"
    directory.mkdir(exist_ok=True)
    (directory / "Dockerfile").write_text(dockerfile)
    paths = TrialPaths(trial_dir=tmp_path / "trial")
    paths.mkdir()
    sandbox_environment = SandboxEnvironment(
        environment_dir=directory,
        environment_name="task",
        session_id="task__env",
        trial_paths=paths,
        task_env_config=EnvironmentConfig.model_validate(config),
        run_label=LABEL,
    )
    try:
        await sandbox_environment.start(force_build=False)
        yield sandbox_environment
    finally:
        await sandbox_environment.stop(delete=True)


def run_tests_as_nobody(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments as an ordinary user. Requires root."""
    drop_privileges = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    drop_privileges += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"]
    command = [
        *drop_privileges,
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
