#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f kosa.txt ] && [ "$(cat kosa.txt)" = 'lisu mopi
mopi vedi
didama mopi
mopi lagezo' ] &&
  [ -f lake.csv ] && [ "$(cat lake.csv)" = 'lisu mopi
veba bivole
pafe mumo
mopi vedi
zutanu nobu
besapa rafamu
supale fepoko
sivuno
kamo
lodu dino
dobifo
bira
gabifi zozo
rada ragada
pero zosade
didama mopi
refa zobe
mopi lagezo
bifepa
toreve
boloko
mine povote
lugo
fivovi
pefafu luzu
fipa' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
