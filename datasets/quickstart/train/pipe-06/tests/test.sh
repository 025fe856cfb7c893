#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f mati.md ] && [ "$(cat mati.md)" = 'ralide lada' ] &&
  [ -f vegi.md ] && [ "$(cat vegi.md)" = 'nimo
feti
pifo
ralide lada
gosuti dora
pela
gasi bepi
zufuti mumu
kibiru ralide
timera zupimu
pima libu
tuboni
bizore
vomo ralide
gona
sunupi tiru
poke zuko
lupo
pava
kenu ralide
vimu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
