#!/bin/bash
cd /app
head -n 6 tomu.csv >> vore.dat
