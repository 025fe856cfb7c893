#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e keti_zemo.csv ] &&
  [ -f pipiza.log ] && [ "$(cat pipiza.log)" = 'zosime
zini pepu' ] &&
  [ -f moma.csv ] && [ "$(cat moma.csv)" = 'seta
mazoge goza' ] &&
  [ -f dega.log ] && [ "$(cat dega.log)" = 'seta
mazoge goza' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
