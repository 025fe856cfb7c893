#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f sara.log ] && [ "$(cat sara.log)" = 'peposi pabu
dupe vitu
lulu pizo' ] &&
  [ -f kabi_nofosu.dat ] && [ "$(cat kabi_nofosu.dat)" = 'tovi
rulo fepaki
teto sosi
gufo
veza fodudu
bigi
peposi pabu
dupe vitu
lulu pizo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
