"""The image of the red team's containers, with the programs that Terminus-2 and the verifiers need. Docker
caches the build.
"""

from __future__ import annotations

import subprocess

from tests.security.red_team.tasks import USER

BASE = "debian:bookworm-slim"
NAME = "agent-trainer-red-team:1"
BUILD_TIMEOUT_S = 300
DOCKERFILE = f"""FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends tmux python3 procps && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash {USER} && mkdir -m 777 /app
WORKDIR /app
"""


def build() -> str:
    """Build the image and return its name. Raises subprocess.CalledProcessError if the build fails."""
    command = ["docker", "build", "--quiet", "--tag", NAME, "-"]
    subprocess.run(
        command, input=DOCKERFILE, text=True, capture_output=True, timeout=BUILD_TIMEOUT_S, check=True
    )
    return NAME
