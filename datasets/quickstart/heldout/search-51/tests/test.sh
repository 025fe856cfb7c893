#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f tebi.txt ] && [ "$(cat tebi.txt)" = 'dale gizo
noge dale
vufu dale
sosa dale' ] &&
  [ -f femize.txt ] && [ "$(cat femize.txt)" = 'fotu
dale gizo
sedive
nezo
kinu
nezu
lolopo
fudi vetiro
dile luku
botezu
sipe
noge dale
zuke litu
doda gudi
gale mane
burabu
vufu dale
vepu
doza kade
dagivi
sema
vigu
kako
sosa dale' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
