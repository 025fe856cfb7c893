#!/usr/bin/env bash
# Removes the sandbox directories of ended runs of this user and, with Docker, the compose projects of their trials.
# Only objects with the label of a run, and objects of compose projects with such a label, are removed. Objects of running
# trainers are kept.
# Prints the removed objects. The exit status is 1 if an object could not be removed.
#
#   scripts/cleanup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || { echo "cleanup: there is no .venv; run scripts/setup.sh first" >&2; exit 1; }
exec .venv/bin/python -m src.envs.cleanup
