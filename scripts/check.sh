#!/usr/bin/env bash
# Checks the code without running it: formatting, lint rules, types, and the links of the documentation.
#
#   scripts/check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
export NO_MKDOCS_2_WARNING=1
.venv/bin/mkdocs build --strict
exec .venv/bin/pyright --threads 2
