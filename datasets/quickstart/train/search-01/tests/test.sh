#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f loro.dat ] && [ "$(cat loro.dat)" = 'lodu time
bifi lodu
lodu bira
zoteva lodu' ] &&
  [ -f radara.txt ] && [ "$(cat radara.txt)" = 'lodu time
bifi lodu
pafe mumo
bene
zutanu nobu
lodu bira
zoteva lodu
sivuno
kamo' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
