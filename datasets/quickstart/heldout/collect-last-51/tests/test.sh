#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f zema.md ] && [ "$(cat zema.md)" = 'bufo
rolu tanuda
fafeni pipe
kide sefego
sazo datu
mupo siki' ] &&
  [ -f kere.csv ] && [ "$(cat kere.csv)" = 'domosi
kanu ruro
kokome vebo
kiko
fudu gapa
fafeni pipe
kide sefego
sazo datu
mupo siki' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
