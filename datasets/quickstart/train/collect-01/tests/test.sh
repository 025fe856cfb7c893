#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f poni.dat ] && [ "$(cat poni.dat)" = 'foko
tosi
meza duze
loviri
dibe
butu mapelu
tefo regure
gezusu
tomuve gikuvo
mereli vimugo
dosu bufale
mapa regu
dali
nalo
rika voga
goru naro
siro lake
ragu' ] &&
  [ -f pefi.md ] && [ "$(cat pefi.md)" = 'meza duze
loviri
dibe
butu mapelu
tefo regure
gezusu
tomuve gikuvo
mereli vimugo
dosu bufale
mapa regu
dali
nalo
rika voga
goru naro
siro lake
ragu
foza dugu
tamo danu
diliki
pize kozu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
