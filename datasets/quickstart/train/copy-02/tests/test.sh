#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f topado.csv ] && [ "$(cat topado.csv)" = 'fako talafo
lufede rise' ] &&
  [ -f popesi.dat ] && [ "$(cat popesi.dat)" = 'fako talafo
lufede rise' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
