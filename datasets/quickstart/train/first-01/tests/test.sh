#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f fuko.txt ] && [ "$(cat fuko.txt)" = 'todisu
gafi bazu
gadesu
redu
tasi logi
toge kuza' ] &&
  [ -f fema_navi.dat ] && [ "$(cat fema_navi.dat)" = 'todisu
gafi bazu
gadesu
redu
tasi logi
toge kuza
guvuko
zuvove tokilu
mono sovi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
