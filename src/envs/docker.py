"""What we ask of a Docker engine ourselves: whether it answers, and to remove what carries our label."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

RUN_LABEL = "agent-trainer.run"
OWNER_LABEL = "agent-trainer.owner"
ANSWER_TIMEOUT_S = 20
REMOVE_TIMEOUT_S = 120
ADDRESS_POOLS = 25  # Docker's default pools hold about 31 networks, and each trial has one


def why_no_engine() -> str | None:
    """Why trials cannot run on Docker here; None when they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for arguments, lack in (
        (["info", "--format", "{{.ServerVersion}}"], "no engine answers"),
        (["compose", "version"], "no `docker compose`"),
    ):
        try:
            answer = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"`docker {arguments[0]}` does not answer"
        if answer.returncode != 0:
            return lack
    return None


def write_label_overlay(directory: Path, *, run_label: str) -> Path:
    """A compose file that marks a trial's container and network as this run's."""
    labels = {RUN_LABEL: run_label, OWNER_LABEL: str(os.getuid())}
    overlay = {"services": {"main": {"labels": labels}}, "networks": {"default": {"labels": labels}}}
    path = directory / "labels.yaml"
    path.write_text(json.dumps(overlay))  # JSON is YAML
    return path


def remove_labelled(*, keep: Iterable[str]) -> list[str]:
    """Remove this user's labelled containers and networks, except those of the runs in `keep`; what was removed."""
    kept = set(keep)
    removed = []
    for kind, listing, removal in (
        ("container", ["ps", "--all"], ["rm", "--force", "--volumes"]),
        ("network", ["network", "ls"], ["network", "rm"]),
    ):
        format_string = f'{{{{.ID}}}} {{{{.Label "{RUN_LABEL}"}}}}'
        command = ["docker", *listing, "--filter", f"label={OWNER_LABEL}={os.getuid()}", "--no-trunc", "--format", format_string]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False)
        for line in answer.stdout.splitlines():
            identifier, _, label = line.partition(" ")
            if label in kept:
                continue
            subprocess.run(["docker", *removal, identifier], capture_output=True, timeout=REMOVE_TIMEOUT_S, check=False)
            removed.append(f"{kind} {identifier[:12]}")
    return removed
