#!/bin/bash
cd /app
grep fufe zide.dat | wc -l > filidu.md
