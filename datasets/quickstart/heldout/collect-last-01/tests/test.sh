#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f ginana.txt ] && [ "$(cat ginana.txt)" = 'roduza toba
migo lubumi
keba bepe
rivi nirofo
vesi
koviso
dibofe sosodi
tesiri
sotimi' ] &&
  [ -f mumara.dat ] && [ "$(cat mumara.dat)" = 'sagiba
bomi
keba bepe
rivi nirofo
vesi
koviso
dibofe sosodi
tesiri
sotimi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
