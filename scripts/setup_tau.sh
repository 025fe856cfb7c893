#!/usr/bin/env bash
# Sets up Sierra's tau2-bench for env=tau_bench in a virtual environment of its own, because the versions of
# packages that it pins conflict with those of Harbor.
#
#   scripts/setup_tau.sh [SOURCE] [DIRECTORY]
#
# SOURCE is the directory of a clone of github.com/sierra-research/tau2-bench, or a git URL with @TAG (default:
# the tested release). DIRECTORY (default .cache/tau2) will contain `source` and `venv`. Set TAU2_HOME to DIRECTORY.
# Relative paths are relative to the root of this repository. If DIRECTORY/source exists, no URL is cloned again, and another SOURCE is refused.
# The package `tau2` of PyPI is unrelated.
set -euo pipefail
cd "$(dirname "$0")/.."

source=${1:-https://github.com/sierra-research/tau2-bench@v1.0.1}
directory=$(realpath -m "${2:-.cache/tau2}")
fail() { printf 'setup_tau: %s\n' "$*" >&2; exit 1; }

uv=$(command -v uv || true)
for candidate in "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do
  if { [ -z "$uv" ] || ! "$uv" --version >/dev/null 2>&1; } && [ -x "$candidate" ]; then uv=$candidate; fi
done
[ -n "$uv" ] && "$uv" --version >/dev/null 2>&1 || fail "no uv found; run scripts/setup.sh first"

mkdir -p "$directory"
if [ -d "$source" ]; then
  if [ -e "$directory/source" ] && ! [ -L "$directory/source" ]; then fail "$directory/source exists; remove it to use $source"; fi
  ln -sfn "$(realpath "$source")" "$directory/source"
elif [ ! -d "$directory/source" ]; then
  git clone -q --depth 1 --branch "${source##*@}" "${source%@*}" "$directory/source" || fail "could not clone ${source%@*}; clone it and pass its path"
elif [ $# -gt 0 ] && [ "$(git -C "$directory/source" describe --tags 2>/dev/null)" != "${source##*@}" ]; then
  fail "$directory/source is not ${source##*@}; remove it to clone this version"
fi
[ -f "$directory/source/src/tau2/registry.py" ] || fail "$directory/source is not sierra-research/tau2-bench: it has no src/tau2/registry.py"
missing_files=$(for name in retail/db.json airline/db.json telecom/tasks.json mock/tasks.json; do
  [ -f "$directory/source/data/tau2/domains/$name" ] || printf '%s ' "$name"; done)

python=$(readlink -f .venv/bin/python || true)
[ -x "$directory/venv/bin/python" ] || "$uv" venv -q --python "${python:->=3.12,<3.14}" "$directory/venv"
"$uv" pip install -q --compile-bytecode --python "$directory/venv/bin/python" -e "$directory/source"
TAU2_DATA_DIR="$directory/source/data" LITELLM_LOCAL_MODEL_COST_MAP=True "$directory/venv/bin/python" -I -c 'import tau2.registry' ||
  fail "tau2 cannot be imported in $directory/venv; remove $directory and run this script again"

[ -z "$missing_files" ] || printf 'setup_tau: the clone lacks %s; the domains of these files cannot be used. Clone the whole repository to use them\n' "$missing_files"
printf 'setup_tau: ready\nexport TAU2_HOME=%s\n' "$directory"
