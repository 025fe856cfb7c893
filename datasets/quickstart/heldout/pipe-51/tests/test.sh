#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f tisaku.csv ] && [ "$(cat tisaku.csv)" = 'neso sumota
sumota tageri
sumota vepiku
tite sumota' ] &&
  [ -f revi.dat ] && [ "$(cat revi.dat)" = 'zifi tudi
deri tagike
luloze duko
nala
tave
fedano fika
pemofi
gela
pumo lagize
mite
sumota vepiku
tite sumota
sumota tageri
datu deze
feba
votamu kukuva
safo vabe
neso sumota
vifuba
sadobi dolo
niso podaze
pobuzi rorino
titu paro
reki
tifepi
vule mafifo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
