#!/usr/bin/env bash
# Sets up everything, then runs the checks: lint, then tests. Arguments go to pytest.
#
#   scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
