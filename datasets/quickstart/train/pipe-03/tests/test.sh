#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f nuvi.dat ] && [ "$(cat nuvi.dat)" = 'tegu
tise foripu
zavu
zito vutu
zuvuni' ] &&
  [ -f getama.md ] && [ "$(cat getama.md)" = 'mugo
zito vutu
bififo disa
duki napo
tise foripu
gepu time
fabi
pufu regebu
kige lodu
betu zurovu
kenu lituzu
posepi
lalo pezole
kuki zalofu
lobo
zuvuni
tegu
luvaro fogusa
rale
pavogu
zavu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
