#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f masa.csv ] && [ "$(cat masa.csv)" = 'bafe
bame
dizosu nefe
futo
giko
kaza
kiku fefi
kinini sofumi
leto gesi
limi linu
mevo
mudo
nimo
pelena
rakuba zuvu
rebu
rozene paso
rubiti futi
suro
temi gadase
vutu
zezo gonone' ] &&
  [ -f tugapi.log ] && [ "$(cat tugapi.log)" = 'leto gesi
kinini sofumi
futo
kaza
rozene paso
mevo
limi linu
vutu
nimo
suro
giko
rakuba zuvu
dizosu nefe
mudo
bafe
bame
pelena
temi gadase
kiku fefi
rubiti futi
rebu
zezo gonone' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
