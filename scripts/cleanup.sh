#!/usr/bin/env bash
# Removes what ended runs of this user left behind: sandbox directories and, with Docker, the compose projects of their trials.
# Only objects with the label of a run, or of a project with this label, are removed. Objects of running trainers stay.
# Prints what was removed. The exit status is 1 if something could not be removed.
#
#   scripts/cleanup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || { echo "cleanup: there is no .venv, so no run was started from this checkout" >&2; exit 1; }
exec .venv/bin/python -m src.envs.cleanup
