#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vave.txt ] && [ "$(cat vave.txt)" = 'vupo
tedo' ] &&
  [ -f fumu.md ] && [ "$(cat fumu.md)" = 'vupo
tedo' ] &&
  [ -d muvo ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
