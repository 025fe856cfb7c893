#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f niru.dat ] && [ "$(cat niru.dat)" = 'dosu nude
fiva sana
guno ribi
koma zupi
nuto
redo
sukuvi
tozefo
vasi fevo' ] &&
  [ -f zozura.dat ] && [ "$(cat zozura.dat)" = 'koma zupi
guno ribi
vasi fevo
sukuvi
redo
nuto
tozefo
fiva sana
dosu nude' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
