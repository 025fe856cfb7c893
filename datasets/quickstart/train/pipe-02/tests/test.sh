#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f kego.dat ] && [ "$(cat kego.dat)" = 'kano vamova
legu' ] &&
  [ -f fege.dat ] && [ "$(cat fege.dat)" = 'kano vamova
legu
nola tade
zale
seruno miruku
piru
nufugo gobiko
duge
zifodu' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
