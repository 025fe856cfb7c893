#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -d none/zove ] &&
  [ -f gukuta.log ] && [ "$(cat gukuta.log)" = 'tovubi
zuze sepi
3064' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
