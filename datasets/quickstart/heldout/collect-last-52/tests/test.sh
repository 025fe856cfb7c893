#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lereno.md ] && [ "$(cat lereno.md)" = 'kuteli dame
rena
tubi
nufa
boke fera
gesito taliza' ] &&
  [ -f tazufa.log ] && [ "$(cat tazufa.log)" = 'zalolu tubu
tepi puvo
suti nanu
zadubo
vekisu befi
lepa
supi totemi
nolu
vepaso
beme
robo fopi
todo nubu
dozo guri
zarinu reze
mira penibo
zoriro mara
kogi
tubi
nufa
boke fera
gesito taliza' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
