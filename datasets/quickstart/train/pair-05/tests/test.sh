#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f niro_tova.txt ] && [ "$(cat niro_tova.txt)" = 'govi' ] &&
  [ -f zari_zime.log ] && [ "$(cat zari_zime.log)" = 'rote
zatezi vapube' ] &&
  [ -f gogo.csv ] && [ "$(cat gogo.csv)" = 'rote
zatezi vapube' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
