#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f latu_pepu.dat ] && [ "$(cat latu_pepu.dat)" = '9' ] &&
  [ -f pugira.log ] && [ "$(cat pugira.log)" = 'ravo
mupi sevetu
fegapi mipifa
mami
zumo gupu
ragabo
popa
dufo
pake gosu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
