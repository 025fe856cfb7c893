#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e lesi.md ] &&
  [ -f zomu.md ] && [ "$(cat zomu.md)" = 'teke mupi
rapidi lori' ] &&
  [ "$(stat -c %a tepure.dat)" = 634 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
