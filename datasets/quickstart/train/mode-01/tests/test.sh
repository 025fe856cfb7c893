#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ "$(stat -c %a paba/medo_ninu.dat)" = 510 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
