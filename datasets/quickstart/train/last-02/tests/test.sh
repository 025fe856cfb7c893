#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vupi_zoti.log ] && [ "$(cat vupi_zoti.log)" = 'gizi
guti gakoma
pove tukiri' ] &&
  [ -f radi.txt ] && [ "$(cat radi.txt)" = 'bena
lito fabi
pina labe
sinabi tiki
buta
gavima bevu
litema lozi
poru bemo
puge
desu nefe
suza limu
lozaga
fimutu rega
tafa pazo
kafi
dene
guli kuge
rebiti goro
nalipo
gizi
guti gakoma
pove tukiri' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
