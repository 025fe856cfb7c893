#!/usr/bin/env bash
# Runs ./run_skyrl_tx.sh with the options of recipes in scripts/recipes/. If an option is given several times,
# the last value is used.
#
#   scripts/recipe.sh retail_4b_grpo_lora tau2_home=.cache/tau2
#   scripts/recipe.sh retail_4b_grpo_lora taxonomy small_memory judge_model=m judge_base_url=http://127.0.0.1:8000/v1
#   scripts/recipe.sh --print retail_8b_grpo_lora         # print the options, for `python -m src.train $(...)` on Tinker's cloud
#
# A recipe contains one key=value per line. A line @NAME includes another recipe. NAME can also be written as
# training/run_NAME.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { printf 'recipe: %s\n' "$*" >&2; exit 2; }

declare -A options
order=()
set_option() { [ -n "${options[${1%%=*}]+set}" ] || order+=("${1%%=*}"); options[${1%%=*}]=${1#*=}; }
read_recipe() {
  local line name=${1##*/}
  name=${name#run_} name=${name%.sh}
  local file=scripts/recipes/$name.args
  [ -f "$file" ] || fail "unknown recipe $name; available recipes: $(cd scripts/recipes && ls | sed 's/\.args$//' | xargs)"
  while read -r line; do
    line=${line%%#*}
    case ${line%"${line##*[![:space:]]}"} in
      '') ;;
      @*) read_recipe "${line#@}" ;;
      *) set_option "${line%"${line##*[![:space:]]}"}" ;;
    esac
  done <"$file"
}

print_only=
for word in "$@"; do
  case $word in
    --print) print_only=yes ;;
    *=*) set_option "$word" ;;
    *) read_recipe "$word" ;;
  esac
done
[ "${#order[@]}" -gt 0 ] || fail "usage: scripts/recipe.sh [--print] NAME... [key=value ...]; names: $(cd scripts/recipes && ls | sed 's/\.args$//' | xargs)"
arguments=()
for name in "${order[@]}"; do arguments+=("$name=${options[$name]}"); done
if [ -n "$print_only" ]; then printf '%s\n' "${arguments[@]}"; else exec ./run_skyrl_tx.sh "${arguments[@]}"; fi
