#!/usr/bin/env bash
# Starts the server in the foreground.
#
#   scripts/start_skyrl_tx.sh [MODEL] [TENSOR_PARALLEL] [key=value ...]
#
# MODEL is a Hugging Face name, a directory, a GGUF file or smollm2-135m (default Qwen/Qwen3-4B). Relative paths
# are relative to the root of this repository. TENSOR_PARALLEL is the number of devices that share each layer
# (default 1). docs/devices.md explains the options for more devices and for several hosts.
# `.venv/bin/python -m skyrl_tx_server --help` lists all options.
# The flags of SkyRL's server (--base-model, --tensor-parallel-size, ...) are also accepted.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
. scripts/gpu_flags.sh
case " $* " in *" --help "*) exec .venv/bin/python -m skyrl_tx_server --help ;; esac
model=Qwen/Qwen3-4B devices=1
case "${1:-}" in '' | -* | [a-z]*=*) ;; *) model=$1; shift ;; esac
case "${1:-}" in '' | -* | [a-z]*=*) ;; *) devices=$1; shift ;; esac
exec .venv/bin/python -m skyrl_tx_server "base_model=$model" "tensor_parallel=$devices" "$@"
