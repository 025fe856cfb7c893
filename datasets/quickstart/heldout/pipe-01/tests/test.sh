#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f goneko.txt ] && [ "$(cat goneko.txt)" = '7' ] &&
  [ -f sebo.md ] && [ "$(cat sebo.md)" = 'vavika
boreno
fodite
rovu fito
bavozu
paza bavo
lelo
gupu
pali pipusu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
