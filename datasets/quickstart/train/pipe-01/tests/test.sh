#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f gavazu.md ] && [ "$(cat gavazu.md)" = '2' ] &&
  [ -f tafuti_biro.md ] && [ "$(cat tafuti_biro.md)" = 'kofu
pide sake
vibula bote
kuku
labe posegi
nofu
kazofo diteze
mifi reboro
nafamo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
