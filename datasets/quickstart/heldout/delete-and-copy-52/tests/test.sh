#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e rina/gaze.csv ] &&
  [ -f bavo.dat ] && [ "$(cat bavo.dat)" = 'tigu rolu
potobi' ] &&
  [ -f mefu.csv ] && [ "$(cat mefu.csv)" = 'tazu
taku' ] &&
  [ -f verena.txt ] && [ "$(cat verena.txt)" = 'tazu
taku' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
