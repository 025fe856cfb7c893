#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -L duvu ] &&
  [ -f duvu ] && [ "$(cat duvu)" = 'ruputi beki
resuge' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
