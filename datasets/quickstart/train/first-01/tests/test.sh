#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f ridiso.txt ] && [ "$(cat ridiso.txt)" = 'todisu
gafi bazu
gadesu
redu
tasi logi' ] &&
  [ -f pube.txt ] && [ "$(cat pube.txt)" = 'todisu
gafi bazu
gadesu
redu
tasi logi
toge kuza
guvuko
zuvove tokilu
mono sovi
fema petu
vana vibufu
mesufi
zani
kofu
lepi nidubu
navi mirure
moke siga
papove furi
kulu rutoke
natu
foba
vokoba pafoda
zeto pevi
bofale' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
