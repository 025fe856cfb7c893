#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f togu.txt ] && [ "$(cat togu.txt)" = '9' ] &&
  [ -f dano.dat ] && [ "$(cat dano.dat)" = 'bamu
fesi
sakime
fidufa
vedogu tabi
sabanu vumo
logoge keki
dunu sagazu
natu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
