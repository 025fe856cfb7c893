#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f solu.log ] && [ "$(cat solu.log)" = 'befe diki
dosu nude
figi
fiva sana
gode puko
gupitu dekaro
kape gupa
kevu
mare
nodifi
pagu seni
pubo ribi
redofu
rupe
samanu natu
sode nedo
toza
tozefo
vute niruse
zogaru
zosu kuvibu
zozura' ] &&
  [ -f saga.md ] && [ "$(cat saga.md)" = 'mare
pagu seni
befe diki
zosu kuvibu
redofu
toza
tozefo
fiva sana
dosu nude
zozura
vute niruse
gupitu dekaro
nodifi
rupe
figi
kevu
zogaru
gode puko
sode nedo
pubo ribi
samanu natu
kape gupa' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
