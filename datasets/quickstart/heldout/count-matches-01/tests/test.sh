#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f viza.dat ] && [ "$(cat viza.dat)" = '4' ] &&
  [ -f kanu.md ] && [ "$(cat kanu.md)" = 'kute zoma
zide zoma
zoma bidate
zoma nuni
safo
tifo lami
kotebo
tone lafike
kegu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
