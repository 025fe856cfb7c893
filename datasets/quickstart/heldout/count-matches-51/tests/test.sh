#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f dimofi.csv ] && [ "$(cat dimofi.csv)" = '4' ] &&
  [ -f pobe.dat ] && [ "$(cat pobe.dat)" = 'roli gome
guga
godeba kide
fobi
kide sepe
kigo kide
valo kide
futavu
nadi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
