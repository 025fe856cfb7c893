#!/usr/bin/env bash
# Sets up everything, then runs the checks: lint, then tests, two files at a time. Arguments go to pytest; `-n 0` is one process.
#
#   scripts/test.sh [pytest arguments]
#
# Both processes keep what they compile in `.cache/xla`: most of the time goes into compiling, and many files compile the same programs.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff check .
export JAX_COMPILATION_CACHE_DIR=$PWD/.cache/xla JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # in the files' own order, which begins with the longest
