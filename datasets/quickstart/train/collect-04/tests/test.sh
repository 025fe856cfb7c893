#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lisibo.dat ] && [ "$(cat lisibo.dat)" = 'nupo
nukine
zimopa laligu
laligu pomora
laligu dodi
laligu tupabe' ] &&
  [ -f luguku_lopo.log ] && [ "$(cat luguku_lopo.log)" = 'rupogu fatu
niba nagodu
dizepo
potu pife
duside
zimopa laligu
fokesi
laligu pomora
vutaga
nipala
dima nisa
fise nipu
fefa muze
kamoza
tudu
voke pedo
zubadu nosu
fipomu negi
laligu dodi
kolu kami
gepata
foviga sovilo
vane voro
laligu tupabe
remi lupa' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
