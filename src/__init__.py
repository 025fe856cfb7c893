"""A GRPO trainer for tool-using agents. `python -m src.train` runs it."""

from importlib.util import find_spec

if find_spec("chz") is None:
    raise SystemExit(
        "error: this Python lacks the packages of the trainer; run scripts/setup.sh, then `source "
        ".venv/bin/activate`, or use .venv/bin/python"
    )
