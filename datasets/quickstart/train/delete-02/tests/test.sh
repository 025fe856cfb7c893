#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e paze.dat ] &&
  [ -f nifo.csv ] && [ "$(cat nifo.csv)" = 'goremi tuto
gelize vofu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
