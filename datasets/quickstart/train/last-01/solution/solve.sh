#!/bin/bash
cd /app
tail -n 5 saliko.csv > vetu.dat
