#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f koma.log ] && [ "$(cat koma.log)" = 'razupi gibi
pima gibi
gibi dizo' ] &&
  [ -f tuboni_bizore.txt ] && [ "$(cat tuboni_bizore.txt)" = 'razupi gibi
dapafe mase
vapi
pima gibi
pupobi tifi
gibi dizo
pela
gibi buge
zufuti mumu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
