#!/usr/bin/env bash
# Sets up .venv, checks the lint rules and runs the tests. Three processes run the tests, because tests of
# containers mostly wait for Docker. Arguments are passed to pytest; `-n 0` uses one process.
#
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" # Without reordering, the integration tests, which take longest, come first.
