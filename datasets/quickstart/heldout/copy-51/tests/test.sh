#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f ruzu.dat ] && [ "$(cat ruzu.dat)" = 'gusami
gara sotu' ] &&
  [ -f peti.csv ] && [ "$(cat peti.csv)" = 'gusami
gara sotu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
