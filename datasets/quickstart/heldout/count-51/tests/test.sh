#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f paneka.csv ] && [ "$(cat paneka.csv)" = '21' ] &&
  [ -f bavova.txt ] && [ "$(cat bavova.txt)" = 'mupi
fegapi mipifa
mami
zumo gupu
ragabo
popa
dufo
pake gosu
pugira nopevu
latu rivi
segine zize
nimu
zomu
munogi
ruru
kigo
fuze
vido vufife
fonilo
tepege soga
zire' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
