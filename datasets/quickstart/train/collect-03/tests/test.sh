#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f guzi.log ] && [ "$(cat guzi.log)" = 'mavi tasevu
diki
dazuvu babu
mili dazuvu
goro dazuvu
dazuvu kolo' ] &&
  [ -f zipu.txt ] && [ "$(cat zipu.txt)" = 'vopi
koga sudama
dazuvu babu
dobe fuku
movo devo
deli puvu
vose
beru tufuto
zozupo
vubo bedo
piveko
fubabu
korabe
morodi
rire
mili dazuvu
tigo nono
rivu boku
goro dazuvu
dazuvu kolo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
