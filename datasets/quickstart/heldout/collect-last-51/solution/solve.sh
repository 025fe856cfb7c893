#!/bin/bash
cd /app
tail -n 4 kere.csv >> zema.md
