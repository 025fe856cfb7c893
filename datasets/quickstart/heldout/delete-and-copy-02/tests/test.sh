#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ ! -e voza.md ] &&
  [ -f giza.md ] && [ "$(cat giza.md)" = 'ninoko keto
terofi lezo' ] &&
  [ -f dori.md ] && [ "$(cat dori.md)" = 'zabi daro
nemo kaguku' ] &&
  [ -f debi.md ] && [ "$(cat debi.md)" = 'zabi daro
nemo kaguku' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
