#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if [ -f lelu.md ] && [ "$(cat lelu.md)" = 'lozire
tapipe zelive
natedi' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
