#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f mesoru.txt ] && [ "$(cat mesoru.txt)" = '9' ] &&
  [ -f lere.txt ] && [ "$(cat lere.txt)" = 'milo
fove pofafe
pisi
dopa
pikape bapa
tupa
kita zenu
lafuro boneta
dose' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
