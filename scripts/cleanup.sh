#!/usr/bin/env bash
# Removes what dead runs of this user left behind: sandbox directories and, with Docker, the compose projects of their trials.
# Only what carries a run label of ours, or belongs to a project that does, is touched, and nothing of a run whose trainer is alive.
# Reports what is gone; exit status 1 when something could not be removed.
#
#   scripts/cleanup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || { echo "cleanup: no .venv here; nothing of ours has run from this checkout" >&2; exit 1; }
exec .venv/bin/python -m src.envs.cleanup
