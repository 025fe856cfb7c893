#!/usr/bin/env bash
# Sets up Sierra's tau2-bench for env=tau_bench in a virtual environment of its own, because the versions of
# packages that it pins conflict with those of Harbor.
#
#   scripts/setup_tau.sh [SOURCE] [FOLDER]
#
# SOURCE is the folder of a clone of github.com/sierra-research/tau2-bench, or a git URL with @TAG (default:
# the tested release). FOLDER (default .cache/tau2) will contain `source` and `venv`. Set TAU2_HOME to FOLDER.
# Relative paths are relative to the root of this repository. If FOLDER/source exists, no URL is cloned again, and another SOURCE is refused.
# The package `tau2` of PyPI is unrelated.
set -euo pipefail
cd "$(dirname "$0")/.."

source=${1:-https://github.com/sierra-research/tau2-bench@v1.0.1}
folder=$(realpath -m "${2:-.cache/tau2}")
fail() { printf 'setup_tau: %s\n' "$*" >&2; exit 1; }

uv=$(command -v uv || true)
for candidate in "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do
  if { [ -z "$uv" ] || ! "$uv" --version >/dev/null 2>&1; } && [ -x "$candidate" ]; then uv=$candidate; fi
done
[ -n "$uv" ] && "$uv" --version >/dev/null 2>&1 || fail "no uv found; run scripts/setup.sh first"

mkdir -p "$folder"
if [ -d "$source" ]; then
  if [ -e "$folder/source" ] && ! [ -L "$folder/source" ]; then fail "$folder/source exists; remove it to use $source"; fi
  ln -sfn "$(realpath "$source")" "$folder/source"
elif [ ! -d "$folder/source" ]; then
  git clone -q --depth 1 --branch "${source##*@}" "${source%@*}" "$folder/source" || fail "could not clone ${source%@*}; clone it and pass its path"
elif [ $# -gt 0 ] && [ "$(git -C "$folder/source" describe --tags 2>/dev/null)" != "${source##*@}" ]; then
  fail "$folder/source is not ${source##*@}; remove it to clone this version"
fi
[ -f "$folder/source/src/tau2/registry.py" ] || fail "$folder/source is not sierra-research/tau2-bench: it has no src/tau2/registry.py"
missing_files=$(for name in retail/db.json airline/db.json telecom/tasks.json mock/tasks.json; do
  [ -f "$folder/source/data/tau2/domains/$name" ] || printf '%s ' "$name"; done)

python=$(readlink -f .venv/bin/python || true)
[ -x "$folder/venv/bin/python" ] || "$uv" venv -q --python "${python:->=3.12,<3.14}" "$folder/venv"
"$uv" pip install -q --compile-bytecode --python "$folder/venv/bin/python" -e "$folder/source"
TAU2_DATA_DIR="$folder/source/data" LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" -I -c 'import tau2.registry' ||
  fail "tau2 cannot be imported in $folder/venv; remove $folder and run this script again"

[ -z "$missing_files" ] || printf 'setup_tau: the clone lacks %s; the domains of these files cannot be used. Clone the whole repository to use them\n' "$missing_files"
printf 'setup_tau: ready\nexport TAU2_HOME=%s\n' "$folder"
