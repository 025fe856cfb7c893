#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vetu.dat ] && [ "$(cat vetu.dat)" = 'velu duva
suzo
dadi
bume gusali
dikena' ] &&
  [ -f saliko.csv ] && [ "$(cat saliko.csv)" = 'tovi
rulo fepaki
teto sosi
gufo
veza fodudu
bigi
peposi pabu
dupe vitu
lulu pizo
kabi
nofosu
raro nilelu
vabu
kobupu palovi
kuta libi
pezi vozosa
sosu
mafoku nazugi
masa
savi
gasu
velu duva
suzo
dadi
bume gusali
dikena' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
