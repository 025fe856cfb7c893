#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f bafe.csv ] && [ "$(cat bafe.csv)" = '9' ] &&
  [ -f lobe.dat ] && [ "$(cat lobe.dat)" = 'puzudi radedi
bimeza
dipi safe
veda pudi
ruki
leveka
tevo vina
pobo
tesebu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
