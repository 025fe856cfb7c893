#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f nebi_rube.md ] && [ "$(cat nebi_rube.md)" = 'dudi gusedi
fine
ziti tona
gesate vafu
vadi leke
kavi
miga
pazema
sepo pavi
vuni sete
kedira' ] &&
  [ -f vodaki.dat ] && [ "$(cat vodaki.dat)" = 'dudi gusedi
fine
ziti tona
gesate vafu
vadi leke
kavi
miga
pazema
sepo pavi
vuni sete
kedira
poki dura
tefi
fake
mapo
bezosa
pupe dukese
ratovo
fagipa
nipa
faso' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
