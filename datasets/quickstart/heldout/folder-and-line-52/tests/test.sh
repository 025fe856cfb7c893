#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -d kugi ] &&
  [ -f bota.txt ] && [ "$(cat bota.txt)" = 'buvi
fomusu doda
rome' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
