#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f doda.txt ] && [ "$(cat doda.txt)" = 'botezu lori
botezu roba
mugu botezu
zuke botezu' ] &&
  [ -f gini.dat ] && [ "$(cat gini.dat)" = 'botezu lori
zugi
botezu roba
mugu botezu
kinu
zuke botezu
lolopo
fudi vetiro
dile luku' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
