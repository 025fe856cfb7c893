#!/bin/bash
cd /app
sort gerude.log | head -n 5 > tegu.md
