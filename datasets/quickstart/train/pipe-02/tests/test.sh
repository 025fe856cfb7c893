#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f mititu.log ] && [ "$(cat mititu.log)" = 'bunoke
duge
goka letise
guge zefa
guto
kebobu
kego
nome
nomiru piru
nufugo gobiko
pavamo
rifu
rosi sutu
satafe
sole lape
veri sutaki
zamopi
zifodu' ] &&
  [ -f limi.dat ] && [ "$(cat limi.dat)" = 'nome
pavamo
sole lape
goka letise
nomiru piru
nufugo gobiko
duge
zifodu
satafe
kego
kebobu
rosi sutu
bunoke
guto
zamopi
rifu
guge zefa
veri sutaki
labe degi
sevo rosodu
sasive dunu
vuga pike
bunu vunu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
