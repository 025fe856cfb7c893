#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f samida.dat ] && [ "$(cat samida.dat)" = 'sobo kove
nili
mupo keti
ludu parozu
dega
rigoku penolo' ] &&
  [ -f fudo_kana.md ] && [ "$(cat fudo_kana.md)" = 'tanavi nevo
gela
tapumu geso
lelu gutu
vuge
mupo keti
ludu parozu
dega
rigoku penolo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
