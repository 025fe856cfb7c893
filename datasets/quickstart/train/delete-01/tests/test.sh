#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e fipo/koni.dat ] &&
  [ -f pame.txt ] && [ "$(cat pame.txt)" = 'litame suzo
nedi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
