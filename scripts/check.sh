#!/usr/bin/env bash
# Checks the code without running it: formatting, lint rules and types.
#
#   scripts/check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
exec .venv/bin/pyright
