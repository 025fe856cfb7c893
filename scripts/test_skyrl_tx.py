"""Check whether a server can train and sample, with a few checks of `python -m src.evaluate.probe`.

    python scripts/test_skyrl_tx.py [URL]

The default URL is the variable SKYRL_TX_URL, or else http://localhost:8000. The key of the server is the
variable TINKER_API_KEY. Both variables are read from the environment, or else from .env or .env.skyrl-tx in
the current directory. The key of a server that `./run_skyrl_tx.sh` started is in a file:

    TINKER_API_KEY=$(cat runs/RUN.server/api_key) python scripts/test_skyrl_tx.py URL

If this Python lacks the package `tinker`, the script starts again with the Python of .venv, if there is one.
The exit status is 0 if all required checks pass, 1 if one of them fails, and 2 if the server cannot be
checked. `loss ppo` is not a required check: if it fails, the script reports this and exits with 0.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKS = (
    "loss cross_entropy",
    "loss ppo",
    "logprobs agree",
    "samplers are fresh",
    "seeds",
    "loads with optimizer",
)


def main(argv: list[str]) -> None:
    python = ROOT / ".venv" / "bin" / "python"
    if find_spec("tinker") is None and python.exists():
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))
    from src.cli.environment_variables import load_environment
    from src.core.process import exit_process
    from src.evaluate.probe.__main__ import main as probe

    load_environment(["backend=skyrl-tx"])
    url = argv[0] if argv else os.environ.get("SKYRL_TX_URL", "http://localhost:8000")
    exit_process(probe([url, f"only={','.join(CHECKS)}", "output="]))


if __name__ == "__main__":
    main(sys.argv[1:])
