#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e povuri_taga.csv ] &&
  [ -f kisu.log ] && [ "$(cat kisu.log)" = 'zone repega
nore sepe' ] &&
  [ -f kavuke_pefaso.md ] && [ "$(cat kavuke_pefaso.md)" = 'gagi sinide
bosilu' ] &&
  [ -f dovo.md ] && [ "$(cat dovo.md)" = 'gagi sinide
bosilu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
