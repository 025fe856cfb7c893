#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e fapo/lika.md ] &&
  [ -f sabire.csv ] && [ "$(cat sabire.csv)" = 'desede zono
vobosa gune' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
