#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lida.txt ] && [ "$(cat lida.txt)" = 'tunopu' ] &&
  [ ! -e dekuse.md ] &&
  [ -f bole.csv ] && [ "$(cat bole.csv)" = 'puzuga
lufi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
