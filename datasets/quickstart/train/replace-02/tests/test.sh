#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f nipe_tageli.log ] && [ "$(cat nipe_tageli.log)" = 'laruku lovi
pudafo mime
bete zafo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
