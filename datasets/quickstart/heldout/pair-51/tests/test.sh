#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -L rini ] &&
  [ -f rini ] && [ "$(cat rini)" = 'zage
tididi pidu' ] &&
  [ -f fobi.csv ] && [ "$(cat fobi.csv)" = 'teri' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
