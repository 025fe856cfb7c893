#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vuve.dat ] && [ "$(cat vuve.dat)" = 'buta
gavima bevu
litema lozi
poru bemo
puge' ] &&
  [ -f desu.log ] && [ "$(cat desu.log)" = 'nuze tabena
lito fabi
pina labe
sinabi tiki
buta
gavima bevu
litema lozi
poru bemo
puge' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
