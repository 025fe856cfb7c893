#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e sari.csv ] &&
  [ -f kuni.csv ] && [ "$(cat kuni.csv)" = 'piso niku
vodo' ] &&
  [ "$(stat -c %a gemeso.csv)" = 460 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
