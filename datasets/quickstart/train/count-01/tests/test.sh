#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f tiga.dat ] && [ "$(cat tiga.dat)" = '21' ] &&
  [ -f gimone.csv ] && [ "$(cat gimone.csv)" = 'gage
fado
kime
fidufa
vedogu tabi
sabanu vumo
logoge keki
dunu sagazu
natu
dano mabe
vuvumu
bemefa
bidovo
tena
kiza meko
kokege
ledupo
neru
kirimi leko
zete futara
sanevu niko' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
