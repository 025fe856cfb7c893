#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zitazo.csv ] && [ "$(cat zitazo.csv)" = 'veno basoku
basoku vazose
malo basoku
gaveno basoku' ] &&
  [ -f goga.txt ] && [ "$(cat goga.txt)" = 'tido
koboke bivugo
gurazu
zasita zeni
kadela seru
buve
kefozo luvu
timo fopuva
rasu
vemota gepava
ruri safufi
vebini nidide
lega sapo
zaza sedeve
voto
gumi
mikedu
minapa
veno basoku
basoku vazose
malo basoku
kafi golo
gaveno basoku' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
