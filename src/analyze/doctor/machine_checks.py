"""Checks of this machine: programs, devices, disk, server and keys."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from src.analyze.doctor.problems import MIN_FREE_GIB, Finding, ProblemName, problem_finding
from src.core.errors import BackendError
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import why_no_engine
from src.policy.backend import check_alive
from src.policy.running_server import REFUSED_KEY, find_server

MIN_PYTHON = (3, 12)  # requires-python of pyproject.toml
JAX_TIMEOUT_S = 120.0  # the first initialisation of a GPU takes up to a minute
KEYS = ("TINKER_API_KEY", "SKYRL_TX_API_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN")
# This program runs in a separate process, which frees the devices when it ends.
JAX_PROGRAM = "import jax; print(*(f'{d.platform}:{d.device_kind}' for d in jax.devices()), sep=', ')"


def machine_findings(skyrl_tx_url: str | None) -> list[Finding]:
    """Return the findings of all checks. If `skyrl_tx_url` is None, no server is checked."""
    checks: Sequence[Callable[[], Finding]] = (python, jax_devices, sandbox, disk, keys)
    findings = [check() for check in checks]
    return findings if skyrl_tx_url is None else [*findings, server(skyrl_tx_url)]


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MIN_PYTHON:
        return Finding(name="Python", measured=f"{version} ({sys.executable})")
    required = ".".join(map(str, MIN_PYTHON))
    return Finding(name="Python", measured=f"{version}; {required} is needed", command="scripts/setup.sh")


def jax_devices() -> Finding:
    """List the devices of JAX, without reserving their memory."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", JAX_PROGRAM],
            capture_output=True,
            text=True,
            timeout=JAX_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        measured = f"JAX did not answer within {JAX_TIMEOUT_S:g} s; another process may hold the device"
        return Finding(name="JAX devices", measured=measured, command="nvidia-smi")
    if done.returncode == 0:
        return Finding(name="JAX devices", measured=done.stdout.strip())
    error = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(name="JAX devices", measured=error, command="scripts/setup.sh")


def sandbox() -> Finding:
    """Check that a bubblewrap sandbox starts or that the Docker engine answers."""
    errors = {"bubblewrap": why_no_sandbox(), "Docker": why_no_engine()}
    measured = "; ".join(f"{name}: {error or 'works'}" for name, error in errors.items())
    if all(errors.values()):
        return problem_finding(ProblemName.NO_SANDBOX, measured)
    return Finding(name="sandbox", measured=measured)


def disk() -> Finding:
    directories = {Path.cwd(), Path(tempfile.gettempdir())}
    free = {directory: shutil.disk_usage(directory).free / 2**30 for directory in sorted(directories)}
    measured = ", ".join(f"{gib:.1f} GiB free in {directory}" for directory, gib in free.items())
    low = [directory for directory, gib in free.items() if gib < MIN_FREE_GIB]
    if not low:
        return Finding(name="disk", measured=measured)
    measured += f"; a run needs {MIN_FREE_GIB:g} GiB"
    command = f"du -xh --max-depth=2 {shlex.quote(str(low[0]))} | sort -h | tail"
    return Finding(name="disk", measured=measured, command=command)


def keys() -> Finding:
    """Report which keys are set, without their values."""
    present = (f"{name} {'yes' if os.environ.get(name) else 'no'}" for name in KEYS)
    return Finding(name="keys", measured=", ".join(present))


def server(url: str) -> Finding:
    url = url.rstrip("/")
    try:
        asyncio.run(check_alive(url))
    except BackendError as error:
        return Finding(name="server", measured=str(error), command="scripts/start_skyrl_tx.sh MODEL")
    models = find_server(url, key=os.environ.get("TINKER_API_KEY", ""))
    if isinstance(models, str):  # the reason why the server cannot be used
        is_refused = models == REFUSED_KEY
        command = "export TINKER_API_KEY=tml-..." if is_refused else "scripts/start_skyrl_tx.sh MODEL"
        return Finding(name="server", measured=f"{url}: {models}", command=command)
    return Finding(name="server", measured=f"ready at {url}")
