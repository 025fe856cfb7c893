#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f tivu.log ] && [ "$(cat tivu.log)" = 'kadu
gusedi
fine
ziti tona
gesate vafu
vadi leke' ] &&
  [ -f sepo.md ] && [ "$(cat sepo.md)" = 'kadu
gusedi
fine
ziti tona
gesate vafu
vadi leke
kavi
miga
pazema' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
