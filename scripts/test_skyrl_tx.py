"""Check whether a server can train and sample, with a few checks of `python -m src.evaluate.probe`.

    .venv/bin/python scripts/test_skyrl_tx.py [URL]

The default URL is SKYRL_TX_URL (from the environment or .env.skyrl-tx), else http://localhost:8000. The key
of the server is TINKER_API_KEY (from the environment or .env). A server that `./run_skyrl_tx.sh` started has
its key in a file:

    TINKER_API_KEY=$(cat runs/RUN.server/api_key) .venv/bin/python scripts/test_skyrl_tx.py URL

The exit status is 0 if all checks pass.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from src.cli.environment_variables import load_environment
from src.core.process import exit_process
from src.evaluate.probe.__main__ import main

CHECKS = (
    "loss cross_entropy",
    "loss ppo",
    "logprobs agree",
    "samplers are fresh",
    "seeds",
    "loads with optimizer",
)

if __name__ == "__main__":
    load_environment(["backend=skyrl-tx"])
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("SKYRL_TX_URL", "http://localhost:8000")
    exit_process(main([url, f"only={','.join(CHECKS)}", "output="]))
