#!/bin/bash
cd /app
grep nipala gapetu_vemavo.csv >> pedo.dat
