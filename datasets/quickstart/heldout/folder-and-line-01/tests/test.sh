#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -d seza ] &&
  [ -f ruro.md ] && [ "$(cat ruro.md)" = 'rifave ruvobi
kigo
5714' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
