#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f midu_beri.log ] && [ "$(cat midu_beri.log)" = 'pamo' ] &&
  [ ! -e fari.csv ] &&
  [ -f zabuta.txt ] && [ "$(cat zabuta.txt)" = 'mudi
nopu niba' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
