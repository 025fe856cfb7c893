#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e bapo/makizo.txt ] &&
  [ -f zideki.md ] && [ "$(cat zideki.md)" = 'kake
toki' ] &&
  [ "$(stat -c %a kafelo.csv)" = 750 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
