#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f vubi.log ] && [ "$(cat vubi.log)" = 'daduse
debeso fode' ] &&
  [ -f dupo_potu.md ] && [ "$(cat dupo_potu.md)" = 'gedide bedi
tova lage
rege
somo
zuku rola
vemumu mubaba
nemu
geru
pada
vave mino
daduse
kogu
kodu sezo
debeso fode
lirivo
zopuva vike
pozu
giri lifi
fanofo zari
dibo ninu
livu senopa
varo zagu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
