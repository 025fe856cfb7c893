#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f filidu.md ] && [ "$(cat filidu.md)" = '4' ] &&
  [ -f zide.dat ] && [ "$(cat zide.dat)" = 'rati
vodova
dati nane
kepa
lilezo pipare
lusa
pano lofefi
fufe dini
vuge
buze
fufe bamoza
bozi
kekena piso
zoze
namo puzuvo
pilele viza
tabova
saboso gosi
telo sesile
fufe givo
dida boda
zone
nuri sami
batalu goleso
tabu megisi
fufe tini' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
