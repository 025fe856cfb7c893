#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e bani.csv ] &&
  [ -f zoruzi.md ] && [ "$(cat zoruzi.md)" = 'deso bado
botome' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
