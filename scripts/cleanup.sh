#!/usr/bin/env bash
# Removes the sandbox directories of ended runs of this user. If a Docker engine answers, the script also
# removes the Docker objects with the label of such a run and all other objects of their compose projects.
# Objects of running trainers and of runs on other hosts are kept. The script prints the objects that it
# removed, skipped or could not remove. The exit status is 1 if a Docker object could not be removed.
#
#   scripts/cleanup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || { echo "cleanup: there is no .venv; run scripts/setup.sh first" >&2; exit 1; }
exec .venv/bin/python -m src.envs.cleanup
