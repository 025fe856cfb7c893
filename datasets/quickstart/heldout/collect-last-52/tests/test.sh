#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f beme.log ] && [ "$(cat beme.log)" = 'boke
luro
dute kuli
befi feposi
lepa
supi totemi' ] &&
  [ -f nolu_kukise.txt ] && [ "$(cat nolu_kukise.txt)" = 'sazofa
mutu vepu
mena bose
pupabu
nizo rivi
dute kuli
befi feposi
lepa
supi totemi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
