#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f losa.csv ] && [ "$(cat losa.csv)" = 'fapanu fopu
filoba tupe
meza dika
dika zipi
dika kuta
dika zusezo' ] &&
  [ -f zozolu.csv ] && [ "$(cat zozolu.csv)" = 'kufe vake
rebe vova
dizili
nivaka kizu
meza dika
madiru zuzo
pomage
mabo bado
gusoso neko
dika zipi
vene
vife
naze sovu
bipo
rusovi loluzi
tiku selito
dika kuta
dope gikafe
dika zusezo
sama
lagiku kugo
kare
defuge dibe
tapo
pobu zedapi
zese ruduri' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
