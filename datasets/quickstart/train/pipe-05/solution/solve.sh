#!/bin/bash
cd /app
sort lobe.dat | wc -l > bafe.csv
