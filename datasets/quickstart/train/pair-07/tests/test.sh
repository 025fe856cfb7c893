#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f sika.dat ] && [ "$(cat sika.dat)" = 'pudi
feze
gepa' ] &&
  [ -f simufu_rovopa.txt ] && [ "$(cat simufu_rovopa.txt)" = 'zazi romupo
nibidu' ] &&
  [ -f tuda.md ] && [ "$(cat tuda.md)" = 'zazi romupo
nibidu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
