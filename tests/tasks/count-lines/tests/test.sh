#!/bin/bash
expected=$(find /app/data -type f -exec cat {} + | wc -l)
if [ "$(tr -d '[:space:]' < /app/count.txt)" = "$expected" ] && [ "$GREETING" = "two words" ]; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi > /logs/verifier/reward.json
