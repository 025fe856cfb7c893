#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f nubo.log ] && [ "$(cat nubo.log)" = 'lumivu votefa
gego votefa
votefa vovi
zegi votefa' ] &&
  [ -f mifosu.dat ] && [ "$(cat mifosu.dat)" = 'lumivu votefa
gego votefa
votefa vovi
zegi votefa
nokodo bifoba
kaba bope
bolo
kimi
zofena bonepe' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
