#!/usr/bin/env bash
# Collects the pinned Python packages of scripts/setup.sh, JAX's CUDA build and uv, for a GPU machine without
# a network. Both machines need Linux x86_64 and the same Python version. The GPU machine also needs the
# system packages of scripts/setup.sh, such as bubblewrap and tmux, which this script does not collect.
#
#   scripts/collect_wheels.sh FOLDER
#
# On the GPU machine, in a copy of this repository, where FOLDER is the path of the copied folder:
#
#   PATH=FOLDER:$PATH UV_NO_INDEX=1 UV_FIND_LINKS=FOLDER scripts/setup.sh
set -euo pipefail
[ $# = 1 ] || { echo "usage: scripts/collect_wheels.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
scripts/setup.sh
uv=$(command -v uv || true)
for candidate in "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do if [ -z "$uv" ] && [ -x "$candidate" ]; then uv=$candidate; fi; done
[ -x "$uv" ] || { echo "collect_wheels: uv is not on PATH; run scripts/setup.sh" >&2; exit 1; }
download() {
  "$uv" run -q --no-project --python .venv/bin/python --with pip python -m pip --disable-pip-version-check download -q --no-cache-dir \
    --only-binary :all: --dest "$folder" "$@"
}
download --require-hashes -r requirements.txt
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -oE '^[A-Za-z0-9._-]+==[^ ;\\]+' requirements.txt >"$constraints"
download -c "$constraints" 'jax[cuda12]'
cp -L "$uv" "$folder/uv"
printf 'collect_wheels: %s files, %s in %s\n' "$(find "$folder" -name '*.whl' | wc -l)" "$(du -sh "$folder" | cut -f1)" "$folder"
