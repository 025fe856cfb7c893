#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f budobu.dat ] && [ "$(cat budobu.dat)" = 'rusovi
tiku selito
neze lerudo
lerudo minu
vife lerudo
lerudo naze' ] &&
  [ -f sovu_pomo.log ] && [ "$(cat sovu_pomo.log)" = 'neze lerudo
rebe vova
dizili
nivaka kizu
tadu
lerudo minu
vife lerudo
mabo bado
lerudo naze' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
