#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f bole.csv ] && [ "$(cat bole.csv)" = '9' ] &&
  [ -f lunone.md ] && [ "$(cat lunone.md)" = 'bega
mufa
vove
pugi
savu danosa
toguma
vuvu
begi kizaka
bozi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
