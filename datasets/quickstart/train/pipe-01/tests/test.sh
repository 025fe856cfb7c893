#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lota.csv ] && [ "$(cat lota.csv)" = '13' ] &&
  [ -f moka.dat ] && [ "$(cat moka.dat)" = 'kofu
pide sake
vibula bote
kuku
labe posegi
nofu
kazofo diteze
mifi reboro
nafamo
motafu
tobi vozi
zusa
leri siva
buviba dakiva
leke vomuri
naza
pikipo diko
noza tupo
pazali
kiba dulo
vivu sado
butedu
rame fezo
lisi bolago
pufusa' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
