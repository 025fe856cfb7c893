#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f tegu.md ] && [ "$(cat tegu.md)" = 'dibe
gedi kobe
geza
nemu
rege' ] &&
  [ -f gerude.log ] && [ "$(cat gerude.log)" = 'gedi kobe
dibe
tova
geza
rege
somo
zuku rola
vemumu mubaba
nemu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
