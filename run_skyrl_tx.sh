#!/usr/bin/env bash
# Trains on our own server, on this machine's accelerator or CPU.
#
#   ./run_skyrl_tx.sh                                  the quick start: small model, small tasks, minutes on two CPU cores
#   ./run_skyrl_tx.sh env=tau_bench                    the same for service agents: customers, tools, a policy to keep
#   ./run_skyrl_tx.sh seed=2 max_steps=4               either with options changed
#   ./run_skyrl_tx.sh model_name=Qwen/Qwen3-4B tasks_dir=./datasets/terminal-bench-2 [key=value ...]
#                                                      the full recipe; a server is started unless one with this model runs
#
# Every option: .venv/bin/python -m src.train --help
set -euo pipefail
cd "$(dirname "$0")"
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
scripts/setup.sh
exec .venv/bin/python -m scripts.run_skyrl_tx "$@"
