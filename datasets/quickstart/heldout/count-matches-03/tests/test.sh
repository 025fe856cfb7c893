#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zofa.dat ] && [ "$(cat zofa.dat)" = '4' ] &&
  [ -f semo.dat ] && [ "$(cat semo.dat)" = 'sadi fozavo
vutuli goda
fekusi tebi
fekusi zoze
zagi lomu
tozoka
kovena fekusi
loga
fekusi nitepu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
