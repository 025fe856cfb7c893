#!/bin/bash
cd /app
wc -l < bavova.txt > paneka.csv
