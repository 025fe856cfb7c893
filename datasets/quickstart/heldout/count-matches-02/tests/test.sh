#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f bumu.txt ] && [ "$(cat bumu.txt)" = '4' ] &&
  [ -f roge.dat ] && [ "$(cat roge.dat)" = 'pimi ritopo
nene ropu
nene sure
zumu fimifa
nene sebo
rusi gizo
kuluma
povelu
tuvu nene' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
