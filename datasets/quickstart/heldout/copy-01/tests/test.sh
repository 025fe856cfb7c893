#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lanuka/nibu.txt ] && [ "$(cat lanuka/nibu.txt)" = 'bikobi
vavo besagu' ] &&
  [ -f gogu.csv ] && [ "$(cat gogu.csv)" = 'bikobi
vavo besagu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
