#!/usr/bin/env bash
# Trains with the server of this repository, on the accelerator or CPU of this machine. Starts the server if none answers at
# skyrl_tx_url.
#
#   ./run_skyrl_tx.sh                        the quick start: a small model and small tasks, minutes on two CPU cores
#   ./run_skyrl_tx.sh env=tau_bench          the quick start of service agents: tools and a user simulator
#   ./run_skyrl_tx.sh quickstart=arithmetic  SmolLM2-135M, a pretrained model, learns word problems in about 15 minutes
#   ./run_skyrl_tx.sh seed=2 max_steps=4     the quick start with other options
#   ./run_skyrl_tx.sh model_name=Qwen/Qwen3-4B tasks_dir=./datasets/terminal-bench-2 [key=value ...]
#                                            the full recipe; starts a server unless a running server has this model
#
# `./run_skyrl_tx.sh --help` lists the options of this command and its defaults, and `--help WORD` the options that contain a word.
# Relative paths and modules (reward=module:function) are those of the directory from which the script is called.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")"
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
scripts/setup.sh
export AGENT_TRAINER_CALLER_DIR="$caller" PYTHONPATH="$caller${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python -m scripts.run_skyrl_tx "$@"
