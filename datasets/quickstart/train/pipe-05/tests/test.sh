#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f mova.log ] && [ "$(cat mova.log)" = '22' ] &&
  [ -f zida.csv ] && [ "$(cat zida.csv)" = 'dirade dipi
gulona fevo
dake difi
kizo fuleve
bada
vina
pobo
tesebu
kaga dalo
gabafe
vegu
zapaso bive
fezuni
sumapo fokete
zeleni
vazo fidozu
ripo
pavi pedegi
tezo gaziso
fogoze mubu
zita saku
ramu rizora' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
