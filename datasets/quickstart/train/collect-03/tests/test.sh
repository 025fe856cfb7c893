#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f dari.csv ] && [ "$(cat dari.csv)" = 'pugu goki
raro ritu
nibe zozupo
piveko zozupo
zozupo vuboro
zozupo fubabu' ] &&
  [ -f kimo.txt ] && [ "$(cat kimo.txt)" = 'nibe zozupo
piveko zozupo
basa dezi
fafo
zozupo vuboro
movo devo
zozupo fubabu
vose
beru tufuto' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
