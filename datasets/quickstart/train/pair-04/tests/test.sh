#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zore.csv ] && [ "$(cat zore.csv)" = 'nenu' ] &&
  [ -f tepo.log ] && [ "$(cat tepo.log)" = 'getupa robu
tome bozu
vedi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
