#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ "$(stat -c %a sama.log)" = 776 ] &&
  [ -f toko.md ] && [ "$(cat toko.md)" = 'raka
bate' ] &&
  [ -f ralota.dat ] && [ "$(cat ralota.dat)" = 'raka
bate' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
