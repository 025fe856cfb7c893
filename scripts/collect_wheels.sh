#!/usr/bin/env bash
# Collects the pinned Python packages of scripts/setup.sh, JAX's CUDA build and uv, for a GPU machine without
# a network. Both machines need Linux x86_64 and the same Python version. The GPU machine also needs the
# system packages of scripts/setup.sh, such as bubblewrap and tmux, which this script does not collect.
#
#   scripts/collect_wheels.sh DIRECTORY
#
# On the GPU machine, in a copy of this repository, where DIRECTORY is the path of the copied directory:
#
#   PATH=DIRECTORY:$PATH UV_NO_INDEX=1 UV_FIND_LINKS=DIRECTORY scripts/setup.sh
set -euo pipefail
[ $# = 1 ] || { echo "usage: scripts/collect_wheels.sh DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
directory=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
scripts/setup.sh
uv=$(command -v uv || true)
for candidate in "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do if [ -z "$uv" ] && [ -x "$candidate" ]; then uv=$candidate; fi; done
[ -x "$uv" ] || { echo "collect_wheels: uv is not on PATH; run scripts/setup.sh" >&2; exit 1; }
download() {
  "$uv" run -q --no-project --python .venv/bin/python --with pip python -m pip --disable-pip-version-check download -q --no-cache-dir \
    --only-binary :all: --dest "$directory" "$@"
}
download --require-hashes -r requirements.txt
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -oE '^[A-Za-z0-9._-]+==[^ ;\\]+' requirements.txt >"$constraints"
download -c "$constraints" 'jax[cuda12]'
cp -L "$uv" "$directory/uv"
printf 'collect_wheels: %s files, %s in %s\n' "$(find "$directory" -name '*.whl' | wc -l)" "$(du -sh "$directory" | cut -f1)" "$directory"
