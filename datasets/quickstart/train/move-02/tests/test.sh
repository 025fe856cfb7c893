#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e siku.csv ] &&
  [ -f zizine/siku.csv ] && [ "$(cat zizine/siku.csv)" = 'petu
lesora zamitu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
