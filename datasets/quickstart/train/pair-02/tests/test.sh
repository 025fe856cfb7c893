#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e sipi/galo.csv ] &&
  [ -f nenamo.csv ] && [ "$(cat nenamo.csv)" = 'zosa
bodoso dubi' ] &&
  [ -L voveda ] &&
  [ -f voveda ] && [ "$(cat voveda)" = 'zule bokesu
geto vake' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
