#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f ralevo.dat ] && [ "$(cat ralevo.dat)" = 'neli redade
pipo
lafi
vizi rubipi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
