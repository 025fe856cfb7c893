#!/bin/bash
cd /app
grep lodu radara.txt > loro.dat
