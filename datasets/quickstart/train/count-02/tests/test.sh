#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f nasu.csv ] && [ "$(cat nasu.csv)" = '20' ] &&
  [ -f kidimo.csv ] && [ "$(cat kidimo.csv)" = 'loze pofa
repi
dotudo kape
pabe
pamo kita
tele
zenu tabuto
zemi
mesoru
nadu
baso
balile
lefo
dite kofo
nizazi ribupi
sitonu disu
zuvi
mazila
nivo sakebu
doru' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
