#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f numeta.csv ] && [ "$(cat numeta.csv)" = 'zuzu
nula' ] &&
  [ -f vaze.txt ] && [ "$(cat vaze.txt)" = 'zuzu
nula' ] &&
  [ -f merata.csv ] && [ ! -s merata.csv ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
