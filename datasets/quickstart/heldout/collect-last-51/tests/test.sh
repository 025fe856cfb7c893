#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f sosa_tami.log ] && [ "$(cat sosa_tami.log)" = 'babe
mama bozobi
sazo datu
mupo siki
kere
kagove popa
zema
gato pobi
setuni
rolu tanuda
lisa nibima
pakova
sotu mami
sozike
zobubu
felanu vize
pufono gosi' ] &&
  [ -f midogi.md ] && [ "$(cat midogi.md)" = 'kanu
kokome
bovule
kiko fuduze
dofo pave
kide sefego
sazo datu
mupo siki
kere
kagove popa
zema
gato pobi
setuni
rolu tanuda
lisa nibima
pakova
sotu mami
sozike
zobubu
felanu vize
pufono gosi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
