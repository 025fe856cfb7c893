#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e kale.csv ] &&
  [ -f vusa_kubavo.dat ] && [ "$(cat vusa_kubavo.dat)" = 'zovuma
lufata' ] &&
  [ "$(stat -c %a binoka/kofosa.txt)" = 604 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
