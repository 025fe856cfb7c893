#!/usr/bin/env bash
# Sets up everything, then runs the checks: lint, then tests, two files at a time. Arguments go to pytest; `-n 0` is one process.
#
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # as collected: integration, the longest, first
