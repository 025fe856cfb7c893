#!/usr/bin/env bash
# Starts the server in the foreground.
#
#   scripts/start_skyrl_tx.sh [MODEL] [TENSOR_PARALLEL] [key=value ...]
#
# MODEL is a Hugging Face id or directory (default Qwen/Qwen3-4B), TENSOR_PARALLEL the devices that share each layer (default 1).
# fsdp_parallel=, data_parallel= and expert_parallel= use more; coordinator_address=, num_processes= and process_id= those of several
# hosts: docs/models-and-devices.md. Further options: python -m skyrl_tx_server --help
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
. scripts/gpu_flags.sh
exec .venv/bin/python -m skyrl_tx_server "base_model=${1:-Qwen/Qwen3-4B}" "tensor_parallel=${2:-1}" "${@:3}"
