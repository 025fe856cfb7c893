#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vore.dat ] && [ "$(cat vore.dat)" = 'livi
gopufi suzu
vegame
zeda
rigu
bivi dibeta
butu
luti' ] &&
  [ -f tomu.csv ] && [ "$(cat tomu.csv)" = 'vegame
zeda
rigu
bivi dibeta
butu
luti
foko
vure
kige' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
