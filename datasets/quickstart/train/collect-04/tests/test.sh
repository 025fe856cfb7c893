#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f pedo.dat ] && [ "$(cat pedo.dat)" = 'pino
vufi muvi
rofe nipala
nipala depi
nipala muze
fise nipala' ] &&
  [ -f gapetu_vemavo.csv ] && [ "$(cat gapetu_vemavo.csv)" = 'rofe nipala
niba nagodu
dizepo
potu pife
nipala depi
nipala muze
fokesi
fise nipala
vutaga' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
