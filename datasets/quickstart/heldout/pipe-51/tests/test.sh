#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vigi.txt ] && [ "$(cat vigi.txt)" = 'beta kufu
beta loba
beta nile
ralopa beta' ] &&
  [ -f pumu.log ] && [ "$(cat pumu.log)" = 'ralopa beta
deri tagike
luloze duko
beta loba
tave
beta kufu
beta nile
gela
pumo lagize' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
