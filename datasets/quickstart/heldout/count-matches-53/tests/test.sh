#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f soma.log ] && [ "$(cat soma.log)" = '4' ] &&
  [ -f sivo.csv ] && [ "$(cat sivo.csv)" = 'tobeni peko
sipupe gota
rodami nibo
lafo
beke goso
give bake
nibo meno
noguge
gevone
mala
vebaki
maso leze
nozozi
feda tupoti
kibi lapu
nibo nebe
koza
gisa sote
nibo dakera
tipu
silo
gugi konezi
lemigu ratero
late kuse' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
