#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f kage.csv ] && [ "$(cat kage.csv)" = '4' ] &&
  [ -f kibi.log ] && [ "$(cat kibi.log)" = 'tobeni peko
feda mala
zoza node
mala doza
mala tupoti
give bake
maso mala
noguge
gevone' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
