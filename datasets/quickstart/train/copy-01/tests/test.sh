#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f bugu/rego.txt ] && [ "$(cat bugu/rego.txt)" = 'bomo
lamo funu' ] &&
  [ -f rani.log ] && [ "$(cat rani.log)" = 'bomo
lamo funu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
