#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f deni.log ] && [ "$(cat deni.log)" = '4' ] &&
  [ -f zoboto.md ] && [ "$(cat zoboto.md)" = 'roli gome
guga
bake tume
fobi
kuto
vufo
mezo kogiki
nogose niri
nadi
kide
nogose reme
gatu nogose
godeba pusa
pobe
guvi
sadi
nogose regozo
mimelo biru
mogi nitu
sige
gipili nimozi
kegu
buvo
vozo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
