#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zetima.md ] && [ "$(cat zetima.md)" = '4' ] &&
  [ -f buvo.txt ] && [ "$(cat buvo.txt)" = 'rati
vodova
dati nane
kepa
zabe buze
lopa buze
pano lofefi
retive buze
buze gazuzo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
