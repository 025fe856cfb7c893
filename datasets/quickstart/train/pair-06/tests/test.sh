#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ "$(stat -c %a sama.log)" = 444 ] &&
  [ -f leku.csv ] && [ "$(cat leku.csv)" = 'vora lotaso
zume rotu' ] &&
  [ -f luve.csv ] && [ "$(cat luve.csv)" = 'vora lotaso
zume rotu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
