#!/bin/bash
cd /app
wc -l < kidimo.csv > nasu.csv
