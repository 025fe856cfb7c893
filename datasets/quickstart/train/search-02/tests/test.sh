#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f romo.csv ] && [ "$(cat romo.csv)" = 'mosa vemota
vemota ruri
vemota nigu
vemota gepava' ] &&
  [ -f reni_sapovi.md ] && [ "$(cat reni_sapovi.md)" = 'mosa vemota
golugu
taru seka
zobelu
vemota ruri
vemota nigu
kefozo luvu
vemota gepava
rasu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
