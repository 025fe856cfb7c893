#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f toleba_muba.csv ] && [ "$(cat toleba_muba.csv)" = 'bimevo mifeli
dizosu nefe
feso suro
giko
mimo kini
rakuba zuvu
siroze netepa
sofumi kasufu
vobile duge' ] &&
  [ -f mudo_nase.txt ] && [ "$(cat mudo_nase.txt)" = 'vobile duge
mimo kini
sofumi kasufu
siroze netepa
bimevo mifeli
feso suro
giko
rakuba zuvu
dizosu nefe' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
