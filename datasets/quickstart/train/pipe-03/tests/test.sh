#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zurovu.log ] && [ "$(cat zurovu.log)" = 'tise foripu
zevu' ] &&
  [ -f betubo.txt ] && [ "$(cat betubo.txt)" = 'bipamu
zevu
bififo disa
duki napo
tise foripu
gepu time
fabi
pufu regebu
kige lodu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
