"""The tasks on which attacks run. Each task requires a file that contains one number."""

from __future__ import annotations

from pathlib import Path

from tests.security.red_team.attack import ANSWER, SANDBOX_ROOT, EnvironmentKind, Kind, RunAs

INSTRUCTION = f"Write the number {ANSWER} and a newline into /app/answer.txt.\n"
MEMORY_MB = 512
STORAGE_MB = 256
AGENT_S = {EnvironmentKind.SANDBOX: 45, EnvironmentKind.DOCKER: 100}
VERIFIER_S = {EnvironmentKind.SANDBOX: 12, EnvironmentKind.DOCKER: 45}
USER = "agent"  # the ordinary user in the image

BASH_TEST = """#!/bin/bash
mkdir -p /tmp/scratch
if [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
"""
PYTHON_TEST = """#!/usr/bin/env bash
cd /app
python3 /tests/check.py
"""
PYTHON_CHECK = """import json
import pathlib
import subprocess

answer = pathlib.Path("/app/answer.txt")
words = answer.read_text().split() if answer.is_file() else []
expected = subprocess.run(["cat", "/tests/expected.txt"], capture_output=True, text=True).stdout.split()
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": int(words == expected)}))
"""


def write_tasks(directory: Path, *, where: EnvironmentKind, run_as: RunAs, image: str, prefix: str) -> None:
    """Write the task directories to `directory`/`<prefix>-<kind>`."""
    for kind in Kind:
        if kind is Kind.PUBLIC and (where, run_as) not in SANDBOX_ROOT:
            continue
        task = directory / f"{prefix}-{kind.value}"
        for name in ("environment", "tests", "solution"):
            (task / name).mkdir(parents=True)
        (task / "instruction.md").write_text(INSTRUCTION)
        (task / "task.toml").write_text(configuration(kind, where=where, run_as=run_as, image=image))
        (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\necho {ANSWER} > /app/answer.txt\n")
        (task / "tests" / "test.sh").write_text(PYTHON_TEST if kind is Kind.PYTHON else BASH_TEST)
        (task / "tests" / "expected.txt").write_text(f"{ANSWER}\n")
        if kind is Kind.PYTHON:
            (task / "tests" / "check.py").write_text(PYTHON_CHECK)
        if where is EnvironmentKind.SANDBOX:
            (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")


def configuration(kind: Kind, *, where: EnvironmentKind, run_as: RunAs, image: str) -> str:
    agent = [f"timeout_sec = {AGENT_S[where]}"]
    environment = [f"memory_mb = {MEMORY_MB}"]
    if where is EnvironmentKind.SANDBOX:
        environment += [
            f"storage_mb = {STORAGE_MB}",
            f'network_mode = "{"public" if kind is Kind.PUBLIC else "no-network"}"',
        ]
    else:  # Harbor can restrict the network only for images from a registry, and this image is local
        environment += [f'docker_image = "{image}"', 'network_mode = "public"']
        if run_as is RunAs.USER:
            agent += [f'user = "{USER}"']
    sections = {
        "agent": agent,
        "verifier": [f"timeout_sec = {VERIFIER_S[where]}"],
        "environment": environment,
    }
    return "\n\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"
