#!/usr/bin/env bash
# Writes the reward: 1 if a line of /app/greeting.txt is exactly hello, else 0.
if grep -qx hello /app/greeting.txt 2>/dev/null; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt
